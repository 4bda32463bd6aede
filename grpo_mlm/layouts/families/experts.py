"""What the families with mixtures of experts share: a router and experts in place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import whole
from grpo_mlm.layouts.families.dense import decoder_weights, gated_mlp, layer_weight, mlp, mlp_norm
from grpo_mlm.layouts.spec import ModelSpec, Moe
from grpo_mlm.layouts.weights import Weight


@dataclass(frozen=True)
class Names:
    """What a family calls the module of a mixture, and the three matrices of each expert.

    `vllm_router` and `vllm_shared`: what vLLM calls the router and the shared MLP where it has names of its own.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    vllm_router: str = ""
    vllm_shared: str = ""


USUAL = Names()


def read_moe(config: dict[str, Any], ffn: str, norm_topk_prob: bool, experts: str = "num_experts") -> Moe:
    """The mixture; `ffn` is the key of an expert's width, `experts` that of their number.

    Transformers 5 calls the number `num_local_experts` in files of some families, which on the hub have their own name.
    """
    if "num_local_experts" in config:
        experts = "num_local_experts"
    moe = Moe(
        experts=whole(config, experts),
        top_k=whole(config, "num_experts_per_tok"),
        ffn=whole(config, ffn),
        norm_topk_prob=norm_topk_prob,
    )
    if moe.top_k > moe.experts:
        raise UserError(f"config.json: num_experts_per_tok {moe.top_k} is more than {experts} {moe.experts}")
    return moe


def moe_weights(spec: ModelSpec, names: Names = USUAL) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return decoder_weights(spec, partial(_feed_forward, names=names))


def _feed_forward(spec: ModelSpec, layer: int, names: Names) -> Iterator[Weight]:
    """The ordinary MLP, or norm, router, shared MLP and experts of one layer."""
    if not spec.has_experts(layer):
        yield from mlp(spec, layer)
        return
    moe = spec.moe
    assert moe is not None
    yield mlp_norm(spec, layer)
    yield from _router(spec, layer, moe, names)
    if moe.shared_ffn:
        yield from gated_mlp(spec, layer, f"{names.block}.shared_experts", moe.shared_ffn, names.vllm_shared)
    for expert in range(moe.experts):
        yield from _expert(spec, layer, moe, names, expert)


def _router(spec: ModelSpec, layer: int, moe: Moe, names: Names) -> Iterator[Weight]:
    """The matrix that scores the experts, and the bias on their scores."""
    router, local, bias = f"{names.block}.gate.", "mlp.router.", "e_score_correction_bias"
    vllm = names.vllm_router or router
    matrix = {router + "weight": (moe.experts, spec.hidden_size)}
    yield layer_weight("replicated", layer, matrix, local + "weight", vllm + "weight")
    if moe.expert_bias:
        vector = {router + bias: (moe.experts,)}
        weight = layer_weight("replicated", layer, vector, local + "expert_bias", vllm + bias)
        yield replace(weight, fp32=True)


def _expert(spec: ModelSpec, layer: int, moe: Moe, names: Names, e: int) -> Iterator[Weight]:
    """The matrices of one expert."""
    at, local = f"{names.block}.experts.{e}.", "mlp.experts.local_experts.{expert}."
    vllm = f"{names.block}.experts.routed_experts."
    fused = {f"{at}{x}.weight": (moe.ffn, spec.hidden_size) for x in (names.gate, names.up)}
    yield layer_weight("gate_up", layer, fused, local + "linear_fc1.weight", vllm + "w13_weight", e)
    second = {f"{at}{names.down}.weight": (spec.hidden_size, moe.ffn)}
    yield layer_weight("columns", layer, second, local + "linear_fc2.weight", vllm + "w2_weight", e)
