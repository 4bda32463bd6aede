"""Mistral without attention windows (from v0.2 on), and models of its shape: Llama's weights under another name."""

from __future__ import annotations

from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.spec import ModelSpec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec. A config without `sliding_window` means one of 4096 tokens, as in transformers."""
    if config.get("sliding_window", 4096) is not None:
        raise UserError("config.json: sliding_window must be null: attention windows are not supported")
    whole(config, "num_key_value_heads")  # its default in transformers is 8, not the number of heads
    return dense_spec(config)
