"""Phi-3 and Phi-4 with full attention: files hold q, k, v as one tensor, and gate and up as one.

Only the canonical side differs from other dense models: rows of a fused tensor in place of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from grpo_mlm.layouts.boxes import Box
from grpo_mlm.layouts.config_json import refuse
from grpo_mlm.layouts.families.dense import (
    decoder_weights,
    dense_spec,
    down_projection,
    input_norm,
    layer_boxes,
    mlp_norm,
    output_projection,
    qkv_rows,
)
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Weight


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec; attention windows and long-context rope ("longrope") are not supported."""
    refuse(config, "sliding_window", (None,))
    return dense_spec(config, norm_eps=1e-5)


def weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return decoder_weights(spec, _mlp, _attention)


def _attention(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    name = "self_attn.qkv_proj.weight"
    parts = _rows_of(name, list(qkv_rows(spec).values()), spec.hidden_size)
    yield input_norm(spec, layer)
    yield layer_boxes("qkv", layer, parts, "self_attention.linear_qkv.weight", name)
    yield from output_projection(spec, layer)


def _mlp(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    name = "mlp.gate_up_proj.weight"
    parts = _rows_of(name, [spec.ffn, spec.ffn], spec.hidden_size)
    yield mlp_norm(spec, layer)
    yield layer_boxes("gate_up", layer, parts, "mlp.linear_fc1.weight", name)
    yield down_projection(spec, layer, "mlp", spec.ffn)


def _rows_of(tensor: str, heights: list[int], width: int) -> list[tuple[str, Box]]:
    """Blocks of these heights that lie one below the other in a tensor."""
    edges = [sum(heights[:i]) for i in range(len(heights) + 1)]
    return [(tensor, (edge, (0, width))) for edge in pairwise(edges)]
