"""A plan: for every destination rank the units it wants and the source rank that sends each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.piece_table import Ints, PieceTable, as_box, volumes
from grpo_mlm.layouts.planner.assignment import Ranks
from grpo_mlm.layouts.planner.copies import Copy, copy_between
from grpo_mlm.layouts.planner.geometry import Side, Units
from grpo_mlm.layouts.planner.nearness import Nearness


@dataclass(frozen=True)
class Delivery:
    """What the destination ranks of one layout get, in the order of its local tensors."""

    row: Ints  # [n] row in the layout's table
    unit: Ints  # [n]
    chosen: Ranks  # [ranks, n] source rank
    nth: dict[int, int]  # destination rank -> row of `chosen`


@dataclass(frozen=True, eq=False)
class Plan:
    """Who sends what to whom. Copies are made when asked for: a large plan has millions of them."""

    sources: tuple[Layout, ...]
    destinations: tuple[Layout, ...]
    tensors: tuple[str, ...]  # canonical names by their number in what follows
    src: Side
    dst: Side
    units: Units
    deliveries: tuple[Delivery, ...]  # one for each distinct layout of the destinations
    near: Nearness

    @property
    def copies(self) -> Copies:
        """All copies, ordered by destination rank, then by its tensors in their layout's order."""
        return Copies(self)

    def sends(self, src: int, dst: int) -> tuple[Copy, ...]:
        """What one source rank sends to one destination rank, in plan order; nothing for ranks not in the plan."""
        if not 0 <= dst < len(self.destinations):
            return ()
        return tuple(self._copies(dst, np.flatnonzero(self.chosen(dst) == src)))

    def receives(self, dst: int) -> Iterator[Copy]:
        """All that one destination rank gets, in plan order."""
        return self._copies(dst, np.arange(len(self.chosen(dst))))

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """(source, destination) of all pairs of ranks with something to send, by destination, then source."""
        return [(int(s), d) for d in range(len(self.destinations)) for s in np.unique(self.chosen(d))]

    @cached_property
    def traffic(self) -> Ints:
        """Elements from each source to each destination, `[sources, destinations]`."""
        elements = np.zeros((len(self.sources), len(self.destinations)), dtype=np.int64)
        size = volumes(self.units.box)
        for rank in range(len(self.destinations)):
            np.add.at(elements[:, rank], self.chosen(rank), size[self._delivery(rank).unit])
        return elements

    def egress(self) -> list[int]:
        """Elements that each source rank sends."""
        return [int(n) for n in self.traffic.sum(axis=1)]

    def ingress(self) -> list[int]:
        """Elements that each destination rank gets."""
        return [int(n) for n in self.traffic.sum(axis=0)]

    @cached_property
    def digest(self) -> str:
        """Hash of all layouts, units and choices; two ranks with equal digests have equal copies."""
        of_source = [_table_digest(table) for table in self.src.tables]
        of_destination = [
            _table_digest(table) + _hash(delivery.row.tobytes() + self.units.box[delivery.unit].tobytes())
            for table, delivery in zip(self.dst.tables, self.deliveries, strict=True)
        ]
        whole = hashlib.sha256(f"{len(self.sources)} {len(self.destinations)}".encode())
        for number in self.src.layout_of.tolist():
            whole.update(of_source[number])
        for rank, number in enumerate(self.dst.layout_of.tolist()):
            whole.update(of_destination[number] + self.chosen(rank).tobytes())
        return whole.hexdigest()

    def chosen(self, dst: int) -> Ranks:
        """The source rank of each of a destination's copies, in plan order."""
        delivery = self._delivery(dst)
        row: Ranks = delivery.chosen[delivery.nth[dst]]
        return row

    def _delivery(self, dst: int) -> Delivery:
        return self.deliveries[int(self.dst.layout_of[dst])]

    def _copies(self, dst: int, which: Ints) -> Iterator[Copy]:
        """Some of a destination's copies, by their numbers."""
        delivery, table = self._delivery(dst), self.dst.tables[int(self.dst.layout_of[dst])]
        unit, ranks = delivery.unit[which], self.chosen(dst)[which]
        layouts = self.src.layout_of[ranks]
        have = self.units.offers.pieces(self.units.part[unit], layouts)
        want = table.piece[delivery.row[which]]
        columns = (self.units.box[unit], ranks, layouts, have, want)
        for box, src, layout, held, wanted in zip(*(column.tolist() for column in columns), strict=True):
            piece = table.layout.pieces[wanted]
            source = self.src.tables[layout].layout.pieces[held]
            yield copy_between(as_box(box, len(piece.box)), src, source, dst, piece)


@dataclass(frozen=True)
class Copies:
    """The copies of a plan, made anew each time one goes through them."""

    plan: Plan

    def __iter__(self) -> Iterator[Copy]:
        for dst in range(len(self.plan.destinations)):
            yield from self.plan.receives(dst)

    def __len__(self) -> int:
        return sum(delivery.chosen.size for delivery in self.plan.deliveries)


def _table_digest(table: PieceTable) -> bytes:
    """Hash of a layout's pieces: tensors, boxes, local tensors and places, in plan order."""
    names = "\n".join(
        f"{piece.tensor}\t{piece.local}\t{len(piece.box)}"
        for piece in (table.layout.pieces[i] for i in table.piece.tolist())
    )
    return _hash(names.encode() + table.box.tobytes() + table.local_box.tobytes())


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
