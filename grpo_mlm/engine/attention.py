"""Causal attention over packed sequences for megatron-core's local layer spec.

Its own attention takes no packed sequences. Here segments of like length are put side by side as one padded
batch: padding goes behind, and a causal mask never looks ahead, so it changes nothing that is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SLACK = 1.25  # a segment joins a padded batch whose length is at most this times its own


@dataclass
class PackedSegments(PackedSeqParams):
    """A packed micro-batch of T tokens, and where its tokens sit in the padded batches of P rows in all."""

    batches: tuple[tuple[int, int], ...] = ()  # (segments, padded length) of each
    tokens: Tensor | None = None  # int64 [T], a permutation of the packed positions
    slots: Tensor | None = None  # int64 [T], the padded row of each of them


def packed_segments(cu_seqlens: Tensor, device: torch.device) -> PackedSegments:
    """From segment boundaries int32 `[M+1]`. `max_seqlen` must be exact: megatron reads a rotary table as long as
    the whole pack as one row a token instead of one row a position."""
    starts = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in zip(starts[:-1], starts[1:], strict=True)]
    batches, tokens, slots, base = [], [], [], 0
    for padded, members in _like_lengths(lengths):
        for i, segment in enumerate(members):
            n = torch.arange(lengths[segment])
            tokens.append(starts[segment] + n)
            slots.append(base + i * padded + n)
        batches.append((len(members), padded))
        base += len(members) * padded
    cu = cu_seqlens.to(device)
    longest = max(lengths)
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        batches=tuple(batches),
        tokens=torch.cat(tokens).to(device),
        slots=torch.cat(slots).to(device),
    )


def _like_lengths(lengths: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(padded length, segments) of each batch; longest first, empty segments left out."""
    groups: list[tuple[int, list[int]]] = []
    for segment in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[segment]
        if n == 0:
            continue
        if not groups or groups[-1][0] > SLACK * n:
            groups.append((n, []))
        groups[-1][1].append(segment)
    return groups


class _MoveRows(torch.autograd.Function):
    """`[A, ...]` -> `[size, ...]`: row source[i] goes to row target[i], other rows are zero.

    Both indices are free of repeats, so the way back is the same move; autograd's own would be a slow scatter-add.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(source, target)
        ctx.rows = x.shape[0]
        return x.new_zeros((size, *x.shape[1:])).index_copy_(0, target, x.index_select(0, source))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        source, target = ctx.saved_tensors
        back = grad.new_zeros((ctx.rows, *grad.shape[1:]))
        return back.index_copy_(0, source, grad.index_select(0, target)), None, None, None


class PackedAttention(MegatronModule):
    """`core_attention` of the local spec: torch's SDPA, grouped queries, no dropout."""

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
        rows = sum(n * length for n, length in segments.batches)
        padded = [_MoveRows.apply(x, segments.tokens, segments.slots, rows) for x in (query, key, value)]
        outs, start = [], 0
        for n, length in segments.batches:
            q, k, v = (
                x[start : start + n * length].view(n, length, *x.shape[1:]).transpose(1, 2) for x in padded
            )
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )
            outs.append(out.transpose(1, 2).reshape(n * length, -1))
            start += n * length
        out = torch.cat(outs) if len(outs) > 1 else outs[0]
        return _MoveRows.apply(out, segments.slots, segments.tokens, query.shape[0])
