"""Makes a plan: which box of which source rank's tensor goes to which box of which destination rank's tensor.

It is a join of two sets of layouts over the canonical tensors, a pure function of metadata: every rank builds
the same one, and compares digests instead of exchanging plans. In three steps: both sides are checked, the boxes
of distinct layouts are joined (`geometry.py`, by `overlap.py`), and every unit gets its source (`assignment.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.collector import without_collector
from grpo_mlm.layouts.coverage import table_faults
from grpo_mlm.layouts.piece_table import Numbers, volumes
from grpo_mlm.layouts.planner.assignment import Demand, choose_sources
from grpo_mlm.layouts.planner.geometry import Side, Units, per_piece, side, units
from grpo_mlm.layouts.planner.nearness import Nearness
from grpo_mlm.layouts.planner.overlap import Parts, join
from grpo_mlm.layouts.planner.plan import Delivery, Plan

UNITS_PER_SHARE = 32
"""What several sources hold is cut into units of at most this fraction of one source's fair share."""

SHOWN_FAULTS = 20
"""An error names so many of its reasons."""


class PlanError(RunFailure):
    """Two sides do not fit together: something is not covered, covered twice, or unknown. Names the tensors."""


@without_collector()
def make_plan(
    src: Sequence[Layout],
    dst: Sequence[Layout],
    device_of: Sequence[str] | None = None,
    node_of: Sequence[str] | None = None,
) -> Plan:
    """Join the layouts of all source ranks with those of all destination ranks.

    Among sources that hold the same elements it takes one on the destination's device, else one on its node; among
    equally near ones all send equally much. `device_of` and `node_of` name the device and the node of every rank,
    sources first. Replicas should share one Layout object: the work is done once for each object.
    PlanError, listing tensors: a side's layout leaves elements unfilled or fills them twice, a destination
    wants what no source has, or a source has what no destination takes.
    """
    near = Nearness(len(src), len(dst), device_of, node_of)
    numbers: Numbers = {}
    sources, destinations = side(src, numbers), side(dst, numbers)
    _check_sides(sources, destinations)
    parts = join(destinations.boxes, sources.boxes)
    _check_fit(sources, destinations, parts, list(numbers))

    total = sum(
        len(ranks) * int(volumes(table.box).sum())
        for ranks, table in zip(destinations.ranks, destinations.tables, strict=True)
    )
    pool = units(sources, parts, most=max(1, total // max(1, len(src)) // UNITS_PER_SHARE))
    deliveries = _deliver(destinations, pool, len(src), near)
    names = tuple(name for name, _ in numbers)
    return Plan(tuple(src), tuple(dst), names, sources, destinations, pool, deliveries, near)


def _deliver(destinations: Side, pool: Units, sources: int, near: Nearness) -> tuple[Delivery, ...]:
    """What each distinct destination layout wants, and who sends it to each of its ranks."""
    size = volumes(pool.box)
    wanted = [per_piece(destinations, number, pool) for number in range(len(destinations.tables))]
    demands = [
        Demand(ranks, pool.holders[unit], size[unit])
        for ranks, (_, unit) in zip(destinations.ranks, wanted, strict=True)
    ]
    chosen = choose_sources(demands, pool.holder_sets, sources, near)
    return tuple(
        Delivery(row, unit, ranks_chosen, {rank: i for i, rank in enumerate(ranks)})
        for (row, unit), ranks_chosen, ranks in zip(wanted, chosen, destinations.ranks, strict=True)
    )


def _check_sides(sources: Side, destinations: Side) -> None:
    """PlanError where a layout does not fill its own tensors exactly once."""
    faults = [
        f"{fault} ({name} {ranks[0]})"
        for name, one in (("source", sources), ("destination", destinations))
        for ranks, table in zip(one.ranks, one.tables, strict=True)
        for fault in table_faults(table)
    ]
    if faults:
        raise PlanError(_message(faults, len(faults)))


def _check_fit(sources: Side, destinations: Side, parts: Parts, names: list[tuple[str, int]]) -> None:
    """PlanError where a destination wants what no source has, or a source has what no destination takes."""
    unused = join(sources.boxes, destinations.boxes).missing
    faults = []
    for number, box in parts.missing[:SHOWN_FAULTS]:
        tensor, dimensions = names[int(destinations.boxes.tensor[number])]
        rank, local = _first_with(destinations, number)
        faults.append(f"{tensor} {box[:dimensions]}: wanted by {local} of destination {rank}, held by none")
    for number, box in unused[:SHOWN_FAULTS]:
        tensor, dimensions = names[int(sources.boxes.tensor[number])]
        faults.append(f"{tensor} {box[:dimensions]}: held by the sources, taken by no destination")
    if faults:
        raise PlanError(_message(faults, len(parts.missing) + len(unused)))


def _first_with(one: Side, number: int) -> tuple[int, str]:
    """The first rank that has this distinct box, and the local tensor where it has it."""
    for table, ranks, of_piece in zip(one.tables, one.ranks, one.boxes.of_piece, strict=True):
        for row in (of_piece == number).nonzero()[0].tolist()[:1]:
            return ranks[0], table.layout.pieces[int(table.piece[row])].local
    raise AssertionError(f"box {number} is in no layout")


def _message(faults: list[str], count: int) -> str:
    shown = [f"  {fault}" for fault in faults[:SHOWN_FAULTS]]
    more = [f"  and {count - len(shown)} more"] if count > len(shown) else []
    return "\n".join(["the weights of the two sides do not fit together:", *shown, *more])
