"""What can go from where to where, before it is decided who sends: the parts of the wanted boxes, their holders.

Everything is worked out once for each *distinct* layout; replicas share one Layout object and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.piece_table import Bools, Ints, Numbers, PieceTable, tabulate, volumes
from grpo_mlm.layouts.planner.overlap import BoxSet, Parts, distinct, expand


@dataclass(frozen=True)
class Side:
    """The ranks of one side by distinct layout."""

    tables: tuple[PieceTable, ...]
    ranks: tuple[tuple[int, ...], ...]  # for each table: the ranks that hold it, ascending
    layout_of: Ints  # [ranks] number of each rank's table
    boxes: BoxSet


@dataclass(frozen=True)
class Units:
    """What is sent as one: boxes of one destination box that all the same sources hold."""

    want: Ints  # [u] the destination side's distinct box, ascending
    box: Ints  # [u, 4] in the canonical tensor
    holders: Ints  # [u] number of the set of source ranks that have it
    holder_sets: list[tuple[int, ...]]
    part: Ints  # [u] the part that it is cut from, as `offers` number it
    offers: Offers


@dataclass(frozen=True)
class Offers:
    """For each part of a wanted box the source pieces that hold it, at most one from a layout."""

    part: Ints  # [o] ascending
    layout: Ints  # [o] number of the source layout, ascending within a part
    piece: Ints  # [o] index in that layout's pieces

    def pieces(self, part: Ints, layout: Ints) -> Ints:
        """The piece of each of these layouts that holds the part beside it."""
        return self.piece[np.searchsorted(self._keys, part * self._width + layout)]

    @cached_property
    def _width(self) -> int:
        return int(self.layout.max(initial=0)) + 1

    @cached_property
    def _keys(self) -> Ints:
        """Part and layout as one ascending number."""
        return self.part * self._width + self.layout


def side(layouts: Sequence[Layout], numbers: Numbers) -> Side:
    """Tables of the distinct layouts, in order of appearance."""
    ranks: dict[int, list[int]] = {}
    for rank, layout in enumerate(layouts):
        ranks.setdefault(id(layout), []).append(rank)
    tables = tuple(tabulate(layouts[held_by[0]], numbers) for held_by in ranks.values())
    layout_of = np.empty(len(layouts), dtype=np.int64)
    for number, held_by in enumerate(ranks.values()):
        layout_of[held_by] = number
    return Side(tables, tuple(tuple(held_by) for held_by in ranks.values()), layout_of, distinct(tables))


def units(src: Side, parts: Parts, most: int) -> Units:
    """The parts with those who hold them; what several hold is cut into units of at most `most` elements."""
    offers = _offers(src, parts)
    holders, holder_sets = _holder_sets(src, offers, len(parts.want))
    several = np.array([len(ranks) > 1 for ranks in holder_sets], dtype=np.bool_)
    part, box = _cut(parts.box, several[holders], most)
    return Units(parts.want[part], box, holders[part], holder_sets, part, offers)


def per_piece(side: Side, number: int, units: Units) -> tuple[Ints, Ints]:
    """(row of the table, unit) of all that one layout wants, in the order of its table."""
    wanted = side.boxes.of_piece[number]
    start = np.searchsorted(units.want, wanted, "left")
    return expand(start, np.searchsorted(units.want, wanted, "right"))


def _offers(src: Side, parts: Parts) -> Offers:
    box = np.concatenate([np.empty(0, np.int64), *src.boxes.of_piece])
    sizes = [len(of_piece) for of_piece in src.boxes.of_piece]
    layout = np.repeat(np.arange(len(sizes)), sizes)
    piece = np.concatenate([np.empty(0, np.int64), *(table.piece for table in src.tables)])
    by_box = np.argsort(box, kind="stable")
    bounds = np.searchsorted(box[by_box], np.arange(len(src.boxes.tensor) + 1))
    row, held = expand(bounds[parts.offer_have], bounds[parts.offer_have + 1])
    part, layout, piece = parts.offer_part[row], layout[by_box[held]], piece[by_box[held]]
    order = np.lexsort((piece, layout, part))
    part, layout, piece = part[order], layout[order], piece[order]
    first = np.ones(len(part), dtype=np.bool_)
    first[1:] = (part[1:] != part[:-1]) | (layout[1:] != layout[:-1])
    return Offers(part[first], layout[first], piece[first])


def _holder_sets(src: Side, offers: Offers, parts: int) -> tuple[Ints, list[tuple[int, ...]]]:
    """For each part the number of its set of source ranks; and the sets."""
    bounds = np.searchsorted(offers.part, np.arange(parts + 1)).tolist()
    numbers: dict[bytes, int] = {}
    holders = np.empty(parts, dtype=np.int64)
    for part, (start, stop) in enumerate(pairwise(bounds)):
        holders[part] = numbers.setdefault(offers.layout[start:stop].tobytes(), len(numbers))
    sets = [np.frombuffer(layouts, dtype=np.int64).tolist() for layouts in numbers]
    return holders, [tuple(sorted(rank for n in layouts for rank in src.ranks[n])) for layouts in sets]


def _cut(box: Ints, may_cut: Bools, most: int) -> tuple[Ints, Ints]:
    """(part, box) of all parts; those that may be cut have at most `most` elements: whole rows, else of one row."""
    large = np.flatnonzero(may_cut & (volumes(box) > most))
    if not len(large):
        return np.arange(len(box)), box
    pieces = np.ones(len(box), dtype=np.int64)
    grids = {part: _grid(box[part].tolist(), most) for part in large.tolist()}
    pieces[large] = [len(grid) for grid in grids.values()]
    part = np.repeat(np.arange(len(box)), pieces)
    cut = box[part]
    starts = np.cumsum(pieces) - pieces
    for number, grid in grids.items():
        cut[starts[number] : starts[number] + len(grid)] = grid
    return part, cut


def _grid(box: list[int], most: int) -> list[tuple[int, int, int, int]]:
    r0, r1, c0, c1 = box
    width = min(c1 - c0, most)
    height = max(1, most // (c1 - c0))
    return [
        (row, min(row + height, r1), column, min(column + width, c1))
        for row in range(r0, r1, height)
        for column in range(c0, c1, width)
    ]
