"""Qwen3 dense: q and k are normalised head by head; no biases."""

from __future__ import annotations

from typing import Any

from grpo_mlm.layouts.config_json import refuse, whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.spec import ModelSpec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec. A config without `head_dim` means 128, as in transformers, not hidden size / heads."""
    refuse(config, "attention_bias", (False,))  # vLLM has no bias on the attention output here
    whole(config, "num_key_value_heads")  # its default in transformers is 32, not the number of heads
    return dense_spec(config, qk_norm=True, head_dim=128)
