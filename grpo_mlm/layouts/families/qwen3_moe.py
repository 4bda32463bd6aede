"""Qwen3 mixture of experts: Qwen3's attention, experts in every layer."""

from __future__ import annotations

from typing import Any

from grpo_mlm.layouts.config_json import refuse, switch, whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.families.experts import read_moe
from grpo_mlm.layouts.spec import ModelSpec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec. Unlike dense Qwen3, a config without `head_dim` means hidden size / heads."""
    refuse(config, "attention_bias", (False,))
    refuse(config, "decoder_sparse_step", (1,))
    refuse(config, "mlp_only_layers", ([],))
    whole(config, "num_key_value_heads")  # its default in transformers is 4, not the number of heads
    moe = read_moe(config, "moe_intermediate_size", switch(config, "norm_topk_prob"))
    return dense_spec(config, qk_norm=True, moe=moe)
