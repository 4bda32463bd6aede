"""Qwen2 and Qwen2.5: always biases on q, k and v, never on the attention output."""

from __future__ import annotations

from typing import Any

from grpo_mlm.layouts.config_json import whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.spec import ModelSpec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec; whatever the config says of biases, the architecture has them fixed."""
    whole(config, "num_key_value_heads")  # its default in transformers is 32, not the number of heads
    return dense_spec(config, qkv_bias=True)
