"""Buckets: pieces of one pair of ranks that travel together, laid end to end in one flat tensor of bytes.

All buckets of all pairs stand in one order that every rank derives from the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from grpo_mlm.layouts.boxes import Box, slices, volume
from grpo_mlm.layouts.planner import Copy, Plan, buckets

DTypes = Mapping[str, torch.dtype]
"""By local name: the precision in which one destination rank holds its tensors, and in which they travel."""

CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Bucket:
    """Pieces from source rank `src` to destination rank `dst`, all of one precision.

    The flat tensor is uint8 `[nbytes]`: the elements; if `checked`, then room for an int64 checksum a piece.
    """

    src: int
    dst: int
    copies: tuple[Copy, ...]
    dtype: torch.dtype
    first: int  # number of its first piece among those of the pair
    checked: bool

    @cached_property
    def payload(self) -> int:
        """Bytes of the elements."""
        return self.dtype.itemsize * sum(volume(copy.box) for copy in self.copies)

    @property
    def nbytes(self) -> int:
        return self._checksums_at + CHECKSUM_BYTES * len(self.copies) if self.checked else self.payload

    def views(self, flat: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """Each copy with its part of the flat tensor, in the copy's shape and precision."""
        elements = flat[: self.payload].view(self.dtype)
        start = 0
        for copy in self.copies:
            stop = start + volume(copy.box)
            yield copy, elements[start:stop].view(_extents(copy.box))
            start = stop

    def checksums(self, flat: Tensor) -> Tensor:
        """The checksums' part of the flat tensor: int64 `[copies]`."""
        return flat[self._checksums_at : self.nbytes].view(torch.int64)

    @property
    def _checksums_at(self) -> int:
        return -(-self.payload // CHECKSUM_BYTES) * CHECKSUM_BYTES


def schedule(
    plan: Plan,
    dtypes: torch.dtype | Sequence[DTypes],
    bucket_bytes: int,
    src: int | None = None,
    dst: int | None = None,
    checked: bool = False,
) -> list[Bucket]:
    """The buckets of the plan, in the order in which all ranks treat them.

    First buckets of all pairs come before second ones; within a round, pairs that share no rank stand together.
    Where `src` or `dst` are given, only what that source sends and what that destination gets. `dtypes`: of every
    destination rank's tensors, or one for all.
    """
    width = max(len(plan.sources), len(plan.destinations))
    keyed = [
        (round_, (a + b) % width, bucket)
        for a, b in plan.pairs
        if a == src or b == dst or (src is None and dst is None)
        for round_, bucket in enumerate(_buckets(plan, dtypes, bucket_bytes, a, b, checked))
    ]
    keyed.sort(key=lambda entry: (*entry[:2], entry[2].src, entry[2].dst))
    return [bucket for *_, bucket in keyed]


@torch.no_grad()
def pack(bucket: Bucket, params: Mapping[str, Tensor], flat: Tensor) -> Tensor:
    """Cast the bucket's pieces of these weights and lay them end to end in `flat`, uint8 `[nbytes]`."""
    for copy, place in bucket.views(flat):
        place.copy_(params[copy.src_local][slices(copy.src_box)])
    return flat


def _buckets(
    plan: Plan, dtypes: torch.dtype | Sequence[DTypes], bucket_bytes: int, src: int, dst: int, checked: bool
) -> Iterator[Bucket]:
    by_dtype: dict[torch.dtype, list[Copy]] = {}
    for copy in plan.sends(src, dst):
        dtype = dtypes if isinstance(dtypes, torch.dtype) else dtypes[dst][copy.dst_local]
        by_dtype.setdefault(dtype, []).append(copy)
    first = 0
    for dtype, copies in by_dtype.items():
        for part in buckets(copies, dtype.itemsize, bucket_bytes):
            yield Bucket(src, dst, tuple(part), dtype, first, checked)
            first += len(part)


def _extents(box: Box) -> list[int]:
    return [stop - start for start, stop in box]
