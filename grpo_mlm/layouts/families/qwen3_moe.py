"""Qwen3 mixture of experts: Qwen3's attention, experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mlm.layouts.config_json import refuse, switch, whole
from grpo_mlm.layouts.families.dense import decoder_weights, dense_spec
from grpo_mlm.layouts.families.experts import expert_weights, read_moe
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Weight


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec. Unlike dense Qwen3, a config without `head_dim` means hidden size / heads."""
    refuse(config, "attention_bias", (False,))
    refuse(config, "decoder_sparse_step", (1,))
    refuse(config, "mlp_only_layers", ([],))
    whole(config, "num_key_value_heads")  # its default in transformers is 4, not the number of heads
    moe = read_moe(config, "moe_intermediate_size", switch(config, "norm_topk_prob"))
    return dense_spec(config, qk_norm=True, moe=moe)


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return decoder_weights(spec, _experts)


def _experts(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    return expert_weights(spec, layer, "mlp", "gate_proj", "up_proj", "down_proj")
