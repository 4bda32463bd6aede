"""Mixtral: Mistral's attention, experts in every layer; gate, up and down are called w1, w3 and w2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_mlm.layouts.config_json import refuse, whole
from grpo_mlm.layouts.families.dense import dense_spec
from grpo_mlm.layouts.families.experts import Names, moe_weights, read_moe
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Weight


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec; attention windows and noise in the router are not supported."""
    refuse(config, "sliding_window", (None,))
    refuse(config, "router_jitter_noise", (0.0,))
    whole(config, "num_key_value_heads")  # its default in transformers is 8, not the number of heads
    moe = read_moe(config, "intermediate_size", norm_topk_prob=True)
    return dense_spec(config, norm_eps=1e-5, rope_theta=1e6, moe=moe)


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return moe_weights(spec, Names("block_sparse_moe", "w1", "w3", "w2"))
