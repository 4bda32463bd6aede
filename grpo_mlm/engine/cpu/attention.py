"""Attention over packed sequences for megatron-core's local layer spec, whose own takes none.

Segments of like length are put side by side as one padded batch. Padding goes behind its segment, and causal
attention never looks ahead, so it changes nothing that is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from grpo_mlm.engine.cpu.causal import causal_attention
from grpo_mlm.engine.cpu.rotary import rotate
from grpo_mlm.engine.cpu.segments import PackedSegments, from_padded, to_padded


class PackedAttention(MegatronModule):
    """`core_attention`: rotary embedding and causal attention with grouped queries, no dropout."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0
        assert config.context_parallel_size == 1
        assert softmax_scale is None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSegments,
        **kwargs: Any,
    ) -> Tensor:
        """query `[T, heads, d]`, key and value `[T, groups, d]` -> `[T, heads * d]`."""
        segments = packed_seq_params
        (tokens, heads, d), groups = query.shape, key.shape[1]
        query, key = rotate(query, *segments.rotary), rotate(key, *segments.rotary)
        q = to_padded(query, segments.rows(heads))
        k, v = (to_padded(x, segments.rows(groups)) for x in (key, value))
        outs, start = [], 0
        for n, length in segments.batches:
            stop = start + n * length
            shared = q[start * heads : stop * heads].view(n * groups, heads // groups, length, d)
            own = [x[start * groups : stop * groups].view(n * groups, length, d) for x in (k, v)]
            outs.append(causal_attention(shared, *own).view(-1, d))
            start = stop
        return from_padded(torch.cat(outs), segments.rows(heads)).view(tokens, heads * d)
