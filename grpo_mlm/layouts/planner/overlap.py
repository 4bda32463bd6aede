"""Joins two sets of boxes: which parts of the wanted boxes lie in which of the boxes that are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_mlm.layouts.boxes import Box, intersect
from grpo_mlm.layouts.coverage import subtract
from grpo_mlm.layouts.piece_table import Bools, Ints, PieceTable, as_box, meeting, rectangles, sums, volumes


@dataclass(frozen=True)
class BoxSet:
    """Distinct boxes of canonical tensors, sorted by tensor, then box; and the pieces that have each of them."""

    tensor: Ints  # [n]
    box: Ints  # [n, 4]
    of_piece: tuple[Ints, ...]  # for each table: the number of the box of each of its pieces


@dataclass(frozen=True)
class Parts:
    """The wanted boxes, cut so that each part lies whole in all boxes that it touches; and what nothing has."""

    want: Ints  # [p] the wanted box, ascending
    box: Ints  # [p, 4]
    offer_part: Ints  # [o] ascending
    offer_have: Ints  # [o] a box that has this part
    missing: list[tuple[int, Box]]  # (wanted box, the part of it that none has)


def distinct(tables: Sequence[PieceTable]) -> BoxSet:
    """The boxes of all tables, each once."""
    tensor = np.concatenate([np.empty(0, np.int64), *(table.tensor for table in tables)])
    box = np.concatenate([np.empty((0, 4), np.int64), *(table.box for table in tables)])
    order = np.lexsort((*box.T[::-1], tensor))
    first = _first_of_run(tensor[order], box[order])
    number = np.empty(len(order), np.int64)
    number[order] = np.cumsum(first) - 1
    bounds = np.cumsum([len(table.tensor) for table in tables])[:-1]
    kept = order[first]
    return BoxSet(tensor[kept], box[kept], tuple(np.split(number, bounds)) if tables else ())


def join(want: BoxSet, have: BoxSet) -> Parts:
    """Cut every wanted box into parts of which each is held by a fixed set of boxes."""
    w, h, box = _sorted(*_intersections(want, have))
    first = _first_of_run(w, box)
    found = sums(volumes(box[first]), w[first], len(want.tensor))
    unsure = np.union1d(meeting(w[first], box[first]), np.flatnonzero(found != volumes(want.box)))
    missing: list[tuple[int, Box]] = []
    if len(unsure):
        clear = ~np.isin(w, unsure)
        cut = _cut_apart(want, have, w[~clear], h[~clear], unsure, missing)
        w, h, box = _sorted(*(np.concatenate([a[clear], b]) for a, b in zip((w, h, box), cut, strict=True)))
        first = _first_of_run(w, box)
    return Parts(w[first], box[first], np.cumsum(first) - 1, h, missing)


def expand(start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Ranges laid end to end: (number of the range, value) of every value in [start, stop)."""
    sizes = stop - start
    number = np.repeat(np.arange(len(sizes)), sizes)
    return number, np.arange(len(number)) - np.repeat(np.cumsum(sizes) - sizes - start, sizes)


def _intersections(want: BoxSet, have: BoxSet) -> tuple[Ints, Ints, Ints]:
    """Pairs of boxes that share elements, and what they share."""
    start = np.searchsorted(have.tensor, want.tensor, "left")
    w, h = expand(start, np.searchsorted(have.tensor, want.tensor, "right"))
    a, b = want.box[w], have.box[h]
    common = np.where(np.array([True, False, True, False]), np.maximum(a, b), np.minimum(a, b))
    real = (common[:, 0] < common[:, 1]) & (common[:, 2] < common[:, 3])
    return w[real], h[real], common[real]


def _cut_apart(
    want: BoxSet, have: BoxSet, w: Ints, h: Ints, unsure: Ints, missing: list[tuple[int, Box]]
) -> tuple[Ints, Ints, Ints]:
    """The general case, box by box: like `_intersections`, but parts of one wanted box are equal or apart.

    What none has is added to `missing`.
    """
    rows: list[tuple[int, int]] = []
    boxes: list[Box] = []
    for number in unsure.tolist():
        holders = h[np.searchsorted(w, number, "left") : np.searchsorted(w, number, "right")].tolist()
        covers = [(holder, as_box(have.box[holder].tolist(), 2)) for holder in dict.fromkeys(holders)]
        for part, held_by in _partition(as_box(want.box[number].tolist(), 2), covers):
            rows += [(number, holder) for holder in held_by]
            boxes += [part] * len(held_by)
            if not held_by:
                missing.append((number, part))
    pairs = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1], rectangles(boxes)


def _partition(box: Box, covers: Iterable[tuple[int, Box]]) -> list[tuple[Box, tuple[int, ...]]]:
    """The box in disjoint parts, each with the numbers of all covers that it lies in."""
    parts: list[tuple[Box, tuple[int, ...]]] = [(box, ())]
    for number, cover in covers:
        after: list[tuple[Box, tuple[int, ...]]] = []
        for part, held_by in parts:
            common = intersect(part, cover)
            if common is None:
                after.append((part, held_by))
            else:
                after.append((common, (*held_by, number)))
                after += [(rest, held_by) for rest in subtract(part, common)]
        parts = after
    return parts


def _sorted(w: Ints, h: Ints, box: Ints) -> tuple[Ints, Ints, Ints]:
    order = np.lexsort((h, *box.T[::-1], w))
    return w[order], h[order], box[order]


def _first_of_run(group: Ints, box: Ints) -> Bools:
    """Where a row differs from the one before it."""
    first = np.ones(len(group), dtype=np.bool_)
    first[1:] = (group[1:] != group[:-1]) | (box[1:] != box[:-1]).any(axis=1)
    return first
