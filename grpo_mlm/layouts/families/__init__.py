"""The registry of model families: one file each, one line here.

A family reads its config.json into a `ModelSpec` and lists its weights; the sides do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_mlm.layouts.families import dots1, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe
from grpo_mlm.layouts.families.dense import dense_weights
from grpo_mlm.layouts.families.experts import moe_weights
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Weight


@dataclass(frozen=True)
class Family:
    """`read` turns a config.json into a spec, `weights` lists every weight of such a model."""

    read: Callable[[dict[str, Any]], ModelSpec]
    weights: Callable[[ModelSpec], Iterable[Weight]]


FAMILIES: dict[str, Family] = {
    "dots1": Family(dots1.read, dots1.weights),
    "llama": Family(llama.read, dense_weights),
    "mistral": Family(mistral.read, dense_weights),
    "mixtral": Family(mixtral.read, mixtral.weights),
    "phi3": Family(phi3.read, phi3.weights),
    "qwen2": Family(qwen2.read, dense_weights),
    "qwen3": Family(qwen3.read, dense_weights),
    "qwen3_moe": Family(qwen3_moe.read, moe_weights),
}
"""By `model_type` of config.json."""
