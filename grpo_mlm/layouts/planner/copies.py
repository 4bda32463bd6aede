"""Copies, the entries of a plan, and how those of one pair of ranks are packed into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from grpo_mlm.layouts.boxes import Box, Piece, volume


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements `box` of canonical `tensor`, from rank `src` to rank `dst`, with their place on both."""

    tensor: str
    box: Box
    src: int
    src_local: str
    src_box: Box
    dst: int
    dst_local: str
    dst_box: Box


def copy_between(box: Box, src: int, have: Piece, dst: int, want: Piece) -> Copy:
    """The copy of canonical `box`, a part of both pieces."""
    return Copy(want.tensor, box, src, have.local, _place(have, box), dst, want.local, _place(want, box))


def buckets(copies: Sequence[Copy], itemsize: int, bucket_bytes: int) -> list[list[Copy]]:
    """Pack one pair's copies, in order, into buckets of at most `bucket_bytes`; greater ones are split first.

    Only a bucket with a single element may exceed the limit. Both ends of the pair get the same packing.
    """
    most = max(1, bucket_bytes // itemsize)
    packed: list[list[Copy]] = []
    room = 0
    for part in (part for copy in copies for part in _split(copy, most)):
        size = volume(part.box)
        if size > room:
            packed.append([])
            room = most
        packed[-1].append(part)
        room -= size
    return packed


def _place(piece: Piece, box: Box) -> Box:
    """Where canonical `box`, a part of the piece, lies in the local tensor."""
    shifts = (at - start for at, (start, _) in zip(piece.at, piece.box, strict=True))
    return tuple((a + s, b + s) for (a, b), s in zip(box, shifts, strict=True))


def _split(copy: Copy, most: int) -> Iterator[Copy]:
    """The copy in parts of at most `most` elements, cut along its first dimensions."""
    size = volume(copy.box)
    if size <= most:
        yield copy
        return
    axis = next(i for i, (start, stop) in enumerate(copy.box) if stop - start > 1)
    start, stop = copy.box[axis]
    step = max(1, most * (stop - start) // size)
    for low in range(0, stop - start, step):
        high = min(low + step, stop - start)
        yield from _split(
            replace(
                copy,
                box=_narrow(copy.box, axis, low, high),
                src_box=_narrow(copy.src_box, axis, low, high),
                dst_box=_narrow(copy.dst_box, axis, low, high),
            ),
            most,
        )


def _narrow(box: Box, axis: int, low: int, high: int) -> Box:
    start = box[axis][0]
    return (*box[:axis], (start + low, start + high), *box[axis + 1 :])
