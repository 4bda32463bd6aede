"""dots.llm1: Qwen3's attention, some dense layers, then experts, a shared MLP and a bias on the router's scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import refuse, switch, whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.families.experts import Names, moe_weights, read_moe
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Weight

# vLLM builds this model out of transformers' modules, and puts router and shared MLP into the one of the experts.
_NAMES = Names(
    vllm_router="mlp.experts.gate.", vllm_shared="mlp.experts._shared_experts._layer.shared_experts"
)


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec. `n_shared_experts` experts that every token goes through are one MLP, as wide as all of them."""
    refuse(config, "attention_bias", (False,))  # megatron-core has none beside a shared MLP
    refuse(config, "moe_layer_freq", (1,))
    whole(config, "num_key_value_heads")  # its default in transformers is 32, not the number of heads
    moe = read_moe(
        config, "moe_intermediate_size", switch(config, "norm_topk_prob"), experts="n_routed_experts"
    )
    moe = replace(
        moe,
        shared_ffn=whole(config, "n_shared_experts") * moe.ffn,
        dense_layers=whole(config, "first_k_dense_replace", 0, least=0),
        expert_bias=True,
    )
    spec = dense_spec(config, qk_norm=True, moe=moe)
    _refuse_windows(config, spec.layers)
    return spec


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return moe_weights(spec, _NAMES)


def _refuse_windows(config: dict[str, Any], layers: int) -> None:
    """UserError where transformers would give some layers an attention window that config.json does not spell out."""
    spelt_out = config.get("layer_types") is not None
    window, first = config.get("sliding_window", 4096), whole(config, "max_window_layers", 62, least=0)
    if not spelt_out and window is not None and first < layers:
        raise UserError(
            f"config.json: layers from {first} on (max_window_layers) have an attention window (sliding_window "
            f"{window}), which is not supported"
        )
