"""A plan: which box of which source rank's tensor goes to which box of which destination rank's tensor.

It is a join of two sets of layouts over the canonical tensors, a pure function of metadata: every rank builds
the same one, and compares digests instead of exchanging plans.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Box, Layout, Piece, intersect, volume
from grpo_mlm.layouts.coverage import layout_faults, remainder, subtract


class PlanError(RunFailure):
    """Two sides do not fit together: something is not covered, covered twice, or unknown. Names the tensors."""


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


@dataclass(frozen=True)
class Plan:
    """All copies, ordered by destination rank, then by its tensors in their layout's order."""

    copies: tuple[Copy, ...]
    sources: tuple[Layout, ...]
    destinations: tuple[Layout, ...]

    @cached_property
    def digest(self) -> str:
        """Hash of every copy; equal on two ranks if and only if they hold the same plan."""
        lines = (
            f"{c.tensor}{c.box}{c.src},{c.src_local}{c.src_box}{c.dst},{c.dst_local}{c.dst_box}\n"
            for c in self.copies
        )
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @cached_property
    def pairs(self) -> dict[tuple[int, int], tuple[Copy, ...]]:
        """Copies by (source rank, destination rank), in plan order."""
        pairs: dict[tuple[int, int], list[Copy]] = defaultdict(list)
        for copy in self.copies:
            pairs[copy.src, copy.dst].append(copy)
        return {pair: tuple(copies) for pair, copies in pairs.items()}

    def sends(self, src: int, dst: int) -> tuple[Copy, ...]:
        """What one source rank sends to one destination rank, in plan order."""
        return self.pairs.get((src, dst), ())


def make_plan(src: Sequence[Layout], dst: Sequence[Layout], node_of: Sequence[str] | None = None) -> Plan:
    """Join the layouts of all source ranks with those of all destination ranks.

    Among sources that hold the same elements it takes one on the destination's node, then the one with the
    fewest elements to send so far. `node_of` names the node of every rank, sources first.
    PlanError, listing tensors: a side's layout leaves elements unfilled or fills them twice, a destination
    wants what no source has, or a source has what no destination takes.
    """
    _check_sides(src, dst)
    holders = _by_tensor(src)
    load = [0] * len(src)
    copies: list[Copy] = []
    faults: list[str] = []
    for rank, layout in enumerate(dst):
        far = [node_of is not None and node_of[s] != node_of[len(src) + rank] for s in range(len(src))]
        for piece in _in_order(layout):
            found, missing = _serve(piece, rank, holders.get(piece.tensor, []), load, far)
            copies += found
            for box in missing:
                faults.append(
                    f"{piece.tensor} {box}: wanted by {piece.local} of destination {rank}, held by none"
                )
    faults += _unused(src, dst)
    if faults:
        raise PlanError(_message(faults))
    return Plan(tuple(copies), tuple(src), tuple(dst))


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


def _check_sides(src: Sequence[Layout], dst: Sequence[Layout]) -> None:
    faults, seen = [], set()
    for side, layouts in (("source", src), ("destination", dst)):
        for rank, layout in enumerate(layouts):
            if id(layout) not in seen:  # replicas share one object
                seen.add(id(layout))
                faults += [f"{fault} ({side} {rank})" for fault in layout_faults(layout)]
    if faults:
        raise PlanError(_message(faults))


def _by_tensor(layouts: Sequence[Layout]) -> dict[str, list[tuple[int, Piece]]]:
    index: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, layout in enumerate(layouts):
        for piece in layout.pieces:
            index[piece.tensor].append((rank, piece))
    return index


def _in_order(layout: Layout) -> list[Piece]:
    """Pieces by local tensor in the order of `shapes`, so that a receiver completes one tensor after another."""
    position = {name: i for i, name in enumerate(layout.shapes)}
    return sorted(layout.pieces, key=lambda piece: (position[piece.local], piece.at))


def _serve(
    want: Piece, dst: int, holders: list[tuple[int, Piece]], load: list[int], far: list[bool]
) -> tuple[list[Copy], list[Box]]:
    """Copies that cover one destination piece, and what of it no source holds. Adds to `load`."""
    near = [(rank, have) for rank, have in holders if intersect(want.box, have.box)]
    near.sort(key=lambda holder: (far[holder[0]], load[holder[0]], holder[0]))
    left, copies = [want.box], []
    for rank, have in near:
        after: list[Box] = []
        for part in left:
            common = intersect(part, have.box)
            if common is None:
                after.append(part)
                continue
            copies.append(_copy(want, have, common, rank, dst))
            load[rank] += volume(common)
            after += subtract(part, common)
        left = after
        if not left:
            break
    return copies, left


def _copy(want: Piece, have: Piece, common: Box, src: int, dst: int) -> Copy:
    return Copy(
        want.tensor, common, src, have.local, _place(have, common), dst, want.local, _place(want, common)
    )


def _place(piece: Piece, box: Box) -> Box:
    """Where canonical `box`, a part of the piece, lies in the local tensor."""
    shifts = (at - start for at, (start, _) in zip(piece.at, piece.box, strict=True))
    return tuple((a + s, b + s) for (a, b), s in zip(box, shifts, strict=True))


def _unused(src: Sequence[Layout], dst: Sequence[Layout]) -> list[str]:
    """Source elements that reach no destination."""
    wanted = {tensor: {piece.box for _, piece in held} for tensor, held in _by_tensor(dst).items()}
    held = {tensor: {piece.box for _, piece in pieces} for tensor, pieces in _by_tensor(src).items()}
    return [
        f"{tensor} {box}: held by the sources, taken by no destination"
        for tensor, boxes in held.items()
        for have in sorted(boxes)
        for box in remainder(have, sorted(wanted.get(tensor, ())))
    ]


def _message(faults: list[str]) -> str:
    shown = [f"  {fault}" for fault in faults[:20]]
    more = [f"  and {len(faults) - 20} more"] if len(faults) > 20 else []
    return "\n".join(["the weights of the two sides do not fit together:", *shown, *more])


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
