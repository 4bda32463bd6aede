"""Executes a plan over the joint group: packed buckets from rank to rank, never a full tensor.

All buckets of all pairs stand in one order that every rank derives from the plan, and every rank works through its
own in that order, two at a time. The first unfinished bucket always has both its ends waiting for it, so nothing
can lock up. A rank that fails closes its connections, and so the failure reaches every rank that waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.bridge.group import JointGroup
from grpo_mlm.layouts.boxes import Box, Layout, slices, volume
from grpo_mlm.layouts.planner import Copy, Plan, buckets

IN_FLIGHT = 2  # buckets: one travels while the next is packed or the last unpacked


@dataclass(frozen=True)
class Bucket:
    """Pieces that travel together from source rank `src` to destination rank `dst`."""

    src: int
    dst: int
    copies: tuple[Copy, ...]

    @property
    def elements(self) -> int:
        return sum(volume(copy.box) for copy in self.copies)

    def views(self, flat: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """Each copy with its part of the bucket's flat tensor `[elements]`, in the copy's shape."""
        start = 0
        for copy in self.copies:
            stop = start + volume(copy.box)
            yield copy, flat[start:stop].view(_extents(copy.box))
            start = stop


def schedule(
    plan: Plan, itemsize: int, bucket_bytes: int, src: int | None = None, dst: int | None = None
) -> list[Bucket]:
    """The buckets of the plan, in the order in which all ranks treat them; of one source or destination, if given.

    First buckets of all pairs come before second ones; within a round, pairs that share no rank stand together.
    """
    width = max(len(plan.sources), len(plan.destinations))
    keyed = [
        (round_, (a + b) % width, a, b, Bucket(a, b, tuple(copies)))
        for a, b in plan.pairs
        if src in (None, a) and dst in (None, b)
        for round_, copies in enumerate(buckets(plan.sends(a, b), itemsize, bucket_bytes))
    ]
    return [bucket for *_, bucket in sorted(keyed, key=lambda entry: entry[:4])]


@torch.no_grad()
def send(
    order: Sequence[Bucket],
    rank: int,
    params: Mapping[str, Tensor],
    dtype: torch.dtype,
    group: JointGroup,
    first_destination: int,
) -> int:
    """Send all that source `rank` owes, as `dtype`; returns the bytes sent. Ranks of the group: sources first."""
    flying: deque[tuple[dist.Work, Tensor]] = deque()
    sent = 0
    try:
        for bucket in order:
            if bucket.src == rank:
                flat = _packed(bucket, params, dtype)
                flying.append((group.send(flat, first_destination + bucket.dst), flat))
                sent += flat.nbytes
                if len(flying) == IN_FLIGHT:
                    flying.popleft()[0].wait()
        while flying:
            flying.popleft()[0].wait()
    except BaseException:
        flying.clear()
        group.close()
        raise
    return sent


@torch.no_grad()
def receive(
    order: Sequence[Bucket],
    rank: int,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
    group: JointGroup,
) -> Generator[tuple[str, Tensor]]:
    """Destination `rank`'s tensors, each as soon as its last piece is in. Padding is zero."""
    missing = _expected(layout)
    partial: dict[str, Tensor] = {}
    for name in [name for name, elements in missing.items() if elements == 0]:  # nothing but padding
        yield name, torch.zeros(layout.shapes[name], dtype=dtype, device=device)
    mine = deque(bucket for bucket in order if bucket.dst == rank)
    flying: deque[tuple[dist.Work, Tensor, Bucket]] = deque()
    try:
        while mine or flying:
            while mine and len(flying) < IN_FLIGHT:
                bucket = mine.popleft()
                flat = torch.empty(bucket.elements, dtype=dtype, device=device)
                flying.append((group.recv(flat, bucket.src), flat, bucket))
            work, flat, bucket = flying.popleft()
            work.wait()
            for copy, piece in bucket.views(flat):
                name = copy.dst_local
                if name not in partial:
                    partial[name] = torch.zeros(layout.shapes[name], dtype=dtype, device=device)
                partial[name][slices(copy.dst_box)] = piece
                missing[name] -= piece.numel()
                if missing[name] == 0:
                    yield name, partial.pop(name)
    except BaseException:
        flying.clear()
        group.close()
        raise


def _packed(bucket: Bucket, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The bucket's pieces of these weights, cast and laid end to end, `[elements]`."""
    device = params[bucket.copies[0].src_local].device
    flat = torch.empty(bucket.elements, dtype=dtype, device=device)
    for copy, place in bucket.views(flat):
        place.copy_(params[copy.src_local][slices(copy.src_box)])
    return flat


def _expected(layout: Layout) -> dict[str, int]:
    """Elements that each local tensor gets."""
    expected = dict.fromkeys(layout.shapes, 0)
    for piece in layout.pieces:
        expected[piece.local] += volume(piece.box)
    return expected


def _extents(box: Box) -> list[int]:
    return [stop - start for start, stop in box]
