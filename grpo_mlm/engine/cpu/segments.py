"""Where the tokens of a packed micro-batch lie in padded batches, and the moves there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from grpo_mlm.engine.cpu.rotary import rotary_table

SLACK = 1.25  # a segment joins a padded batch whose length is at most this times its own


@dataclass(frozen=True)
class Rows:
    """The moves for tensors of `heads` rows a token; a padded batch is laid out `[segments, heads, length]`."""

    # int64 [P * heads], the packed row of each padded one; padding repeats a row of its segment
    gather: Tensor
    slots: Tensor  # int64 [T * heads], the padded row of each packed one


@dataclass
class PackedSegments(PackedSeqParams):
    """A packed micro-batch of T tokens, P with padding."""

    batches: tuple[tuple[int, int], ...] = ()  # (segments, padded length) of each padded batch
    # of each, the packed position of every padded one, int64 [segments, length]
    tokens: tuple[Tensor, ...] = ()
    real: tuple[Tensor, ...] = ()  # of each, which ones are no padding, bool [segments, length]
    rotary: tuple[Tensor, Tensor] = ()  # type: ignore[assignment]  # cos and sin of each packed token's angles
    _rows: dict[int, Rows] = field(default_factory=dict)

    def rows(self, heads: int) -> Rows:
        """The moves for that many heads; the same in every layer."""
        if heads not in self._rows:
            self._rows[heads] = self._make_rows(heads)
        return self._rows[heads]

    def _make_rows(self, heads: int) -> Rows:
        head = torch.arange(heads)[None, :, None]
        gather = torch.cat([(t[:, None] * heads + head).flatten() for t in self.tokens])
        real = torch.cat([r[:, None].expand(-1, heads, -1).flatten() for r in self.real])
        slots = torch.empty(int(real.sum()), dtype=torch.int64)
        slots[gather[real]] = real.nonzero()[:, 0]
        return Rows(gather, slots)


def packed_segments(
    cu_seqlens: Tensor, position_ids: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> PackedSegments:
    """From segment boundaries int32 `[M+1]` and positions int64 `[T]`."""
    bounds = cu_seqlens.tolist()
    lengths = cu_seqlens.diff().tolist()
    batches, tokens, real = [], [], []
    for length, members in _like_lengths(lengths):
        offsets = torch.arange(length)
        inside = offsets < torch.tensor([lengths[i] for i in members])[:, None]
        starts = torch.tensor([bounds[i] for i in members])[:, None]
        batches.append((len(members), length))
        tokens.append(torch.where(inside, starts + offsets, starts))
        real.append(inside)
    return PackedSegments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        batches=tuple(batches),
        tokens=tuple(tokens),
        real=tuple(real),
        rotary=rotary_table(position_ids, inverse_frequencies, dtype),
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


def to_padded(x: Tensor, rows: Rows) -> Tensor:
    """`[T, heads, d]` -> `[P * heads, d]`. What is computed from padding must not be used: it has no gradient."""
    return _ToPadded.apply(x.reshape(-1, x.shape[-1]), rows).view(-1, x.shape[-1])


def from_padded(x: Tensor, rows: Rows) -> Tensor:
    """`[P * heads, d]` -> `[T * heads, d]`, the padding left behind."""
    return _FromPadded.apply(x, rows)


class _ToPadded(torch.autograd.Function):
    """Autograd's own way back from a gather is a slow scatter-add; here it is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.rows.slots), None


class _FromPadded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return x.index_select(0, rows.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows = ctx.rows
        padded = grad.new_zeros((len(rows.gather), grad.shape[1]))
        return padded.index_copy_(0, rows.slots, grad), None
