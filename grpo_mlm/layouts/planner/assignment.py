"""Which source serves which unit: the nearest that have it, and among those so that all send equally much.

A unit is a box that one destination wants; every unit has a set of candidates. Units with the same candidates and
volume form a group, and only groups are weighed against each other, so that millions of units cost little.
All arithmetic is in integers: every rank finds the same answer, whatever its processor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_mlm.layouts.piece_table import Ints
from grpo_mlm.layouts.planner.nearness import Nearness

SWEEPS = 50
"""At most so many rounds of weighing the candidate sets against each other; two or three do as a rule."""

Ranks = NDArray[np.int32]

Candidates = tuple[int, ...]
Group = tuple[Candidates, int]
"""Candidates, in ascending order, and the volume of a unit."""


@dataclass(frozen=True)
class Demand:
    """What each of some destination ranks, replicas of one layout, wants."""

    ranks: tuple[int, ...]
    holders: Ints  # [u] for each unit: number of the set of source ranks that have it
    volume: Ints  # [u]


def choose_sources(
    demands: Sequence[Demand], holder_sets: Sequence[Candidates], sources: int, near: Nearness
) -> list[Ranks]:
    """The source rank of every unit: one array `[ranks, u]` for each demand."""
    numbers: dict[Group, int] = {}
    group_of = [_group_units(demand, holder_sets, near, numbers) for demand in demands]
    groups = list(numbers)
    units = np.zeros(len(groups), dtype=np.int64)
    for array in group_of:
        units += np.bincount(array.ravel(), minlength=len(groups))
    shares = share_out(groups, units, sources)
    return _deal(demands, group_of, groups, shares)


def share_out(groups: Sequence[Group], units: Ints, sources: int) -> list[Ints]:
    """How many of each group's units each of its candidates sends.

    First the elements of each candidate set are spread as if they could be cut anywhere, again and again until
    no load changes: this minimises the sum of squared loads. Then whole units are handed out, the largest first,
    each time on top of what the rest is going to bring.
    """
    loads = np.zeros(sources, dtype=np.int64)
    left: dict[Candidates, int] = defaultdict(int)
    for (candidates, volume), count in zip(groups, units.tolist(), strict=True):
        left[candidates] += volume * count
    index = {candidates: np.array(candidates) for candidates in left}
    spread = _spread(left, index, loads)
    shares: list[Ints] = [np.empty(0, np.int64)] * len(groups)
    for number in sorted(range(len(groups)), key=lambda n: (-groups[n][1], len(groups[n][0]), groups[n][0])):
        candidates, volume = groups[number]
        ranks, count = index[candidates], int(units[number])
        loads[ranks] -= spread[candidates]
        shares[number] = water_fill(loads[ranks], count, volume)
        loads[ranks] += shares[number] * volume
        left[candidates] -= count * volume
        spread[candidates] = water_fill(loads[ranks], left[candidates])
        loads[ranks] += spread[candidates]
    return shares


def water_fill(loads: Ints, units: int, volume: int = 1) -> Ints:
    """How many of `units` of this volume each load takes, so that the lowest loads rise to one level."""
    ascending = np.sort(loads)
    levels = (units * volume + np.cumsum(ascending)) // np.arange(1, len(loads) + 1)
    level = levels[
        np.flatnonzero(levels >= ascending)[-1]
    ]  # as many take part as lie below their common level
    counts = np.maximum(level - loads, 0) // volume
    rest = units - int(counts.sum())  # less than one for each that takes part
    counts[np.argsort(loads + counts * volume, kind="stable")[:rest]] += 1
    return counts


def _spread(
    elements: dict[Candidates, int], index: dict[Candidates, Ints], loads: Ints
) -> dict[Candidates, Ints]:
    """Elements that each candidate of each set sends; adds them to `loads`."""
    spread = {candidates: np.zeros(len(candidates), dtype=np.int64) for candidates in elements}
    order = sorted(elements, key=lambda candidates: (len(candidates), candidates))
    still = sum(elements.values()) // max(1, len(loads)) // 1000 + 1
    for _ in range(SWEEPS):
        before = loads.copy()
        for candidates in order:
            ranks = index[candidates]
            loads[ranks] -= spread[candidates]
            spread[candidates] = water_fill(loads[ranks], elements[candidates])
            loads[ranks] += spread[candidates]
        if np.abs(loads - before).max(initial=0) <= still:
            break
    return spread


def _group_units(
    demand: Demand, holder_sets: Sequence[Candidates], near: Nearness, numbers: dict[Group, int]
) -> Ints:
    """The group number of every unit `[ranks, u]`; new groups are added to `numbers`."""
    keys = np.stack([demand.holders, demand.volume], axis=1)
    kinds, kind_of = np.unique(keys, axis=0, return_inverse=True)
    table = [
        [
            numbers.setdefault((near.nearest(holder_sets[holders], rank), volume), len(numbers))
            for holders, volume in kinds.tolist()
        ]
        for rank in demand.ranks
    ]
    return np.array(table, dtype=np.int64).reshape(len(demand.ranks), -1)[:, kind_of.ravel()]


def _deal(
    demands: Sequence[Demand], group_of: Sequence[Ints], groups: Sequence[Group], shares: Sequence[Ints]
) -> list[Ranks]:
    """Hand each group's units out in turn, over all destinations at once: what they want at the same point of
    their lists comes from different sources."""
    position = [np.broadcast_to(np.arange(array.shape[1]), array.shape).ravel() for array in group_of]
    rank = [np.repeat(np.array(d.ranks), array.shape[1]) for d, array in zip(demands, group_of, strict=True)]
    flat = np.concatenate([np.empty(0, np.int64), *(array.ravel() for array in group_of)])
    places = np.concatenate([np.empty(0, np.int64), *rank])
    points = np.concatenate([np.empty(0, np.int64), *position])
    ranks, longest = int(places.max(initial=0)) + 1, int(points.max(initial=0)) + 1
    order = np.argsort((flat * longest + points) * ranks + places, kind="stable")
    turns = [_turns(candidates, share) for (candidates, _), share in zip(groups, shares, strict=True)]
    chosen = np.empty(len(flat), dtype=np.int32)
    chosen[order] = np.concatenate([np.empty(0, np.int64), *turns])
    bounds = np.cumsum([array.size for array in group_of])[:-1]
    parts = np.split(chosen, bounds) if demands else []
    return [part.reshape(array.shape) for part, array in zip(parts, group_of, strict=True)]


def _turns(candidates: Candidates, share: Ints) -> Ints:
    """Each candidate as often as its share says, all evenly mixed."""
    if len(candidates) == 1:
        return np.full(int(share[0]), candidates[0], dtype=np.int64)
    which = np.repeat(np.arange(len(candidates)), share)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(share) - share, share)
    order = np.argsort((2 * nth + 1) / (2 * share[which]), kind="stable")
    return np.array(candidates)[which[order]]
