"""What the families with mixtures of experts share: a router and experts in place of each layer's MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import whole
from grpo_mlm.layouts.families.dense import layer_weight, mlp_norm
from grpo_mlm.layouts.spec import ModelSpec, Moe
from grpo_mlm.layouts.weights import Weight


def read_moe(config: dict[str, Any], ffn: str, norm_topk_prob: bool) -> Moe:
    """The mixture; `ffn` is the key of an expert's width. Transformers 5 calls the number of experts
    `num_local_experts` in files of either family; those on the hub have the family's own name."""
    experts = "num_local_experts" if "num_local_experts" in config else "num_experts"
    moe = Moe(
        experts=whole(config, experts),
        top_k=whole(config, "num_experts_per_tok"),
        ffn=whole(config, ffn),
        norm_topk_prob=norm_topk_prob,
    )
    if moe.top_k > moe.experts:
        raise UserError(f"config.json: num_experts_per_tok {moe.top_k} is more than {experts} {moe.experts}")
    return moe


def expert_weights(
    spec: ModelSpec, layer: int, block: str, gate: str, up: str, down: str
) -> Iterator[Weight]:
    """Norm, router and experts of one layer; `block` is their module's name, the others an expert's three matrices."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    router = f"{block}.gate.weight"
    yield mlp_norm(spec, layer)
    yield layer_weight("replicated", layer, {router: (moe.experts, hidden)}, "mlp.router.weight", router)
    for e in range(moe.experts):
        at, local = f"{block}.experts.{e}.", "mlp.experts.local_experts.{expert}."
        vllm = f"{block}.experts.routed_experts."
        fused = {f"{at}{x}.weight": (moe.ffn, hidden) for x in (gate, up)}
        yield layer_weight("gate_up", layer, fused, local + "linear_fc1.weight", vllm + "w13_weight", e)
        second = {f"{at}{down}.weight": (hidden, moe.ffn)}
        yield layer_weight("columns", layer, second, local + "linear_fc2.weight", vllm + "w2_weight", e)
