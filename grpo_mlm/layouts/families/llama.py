"""Llama 2 and 3 and models of their shape: no biases by default, no q/k norms."""

from __future__ import annotations

from typing import Any

from grpo_mlm.layouts.config_json import refuse, switch
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.spec import ModelSpec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec; `attention_bias` puts biases on q, k, v and the attention output."""
    refuse(config, "mlp_bias", (False,))
    bias = switch(config, "attention_bias")
    return dense_spec(config, qkv_bias=bias, o_bias=bias)
