"""What a plan amounts to: a summary for programs, and lines of text for people."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_mlm.layouts.boxes import volume
from grpo_mlm.layouts.piece_table import volumes
from grpo_mlm.layouts.planner.geometry import Side
from grpo_mlm.layouts.planner.plan import Plan


@dataclass(frozen=True)
class TensorTraffic:
    """One canonical tensor in a plan: what it is called on either side, its copies and all their bytes."""

    tensor: str
    source_names: tuple[str, ...]
    destination_names: tuple[str, ...]
    copies: int
    bytes: int


def summary(plan: Plan, itemsize: int, bucket_bytes: int | None = None) -> dict[str, Any]:
    """The plan in numbers that go into JSON; bytes are those of elements of `itemsize` bytes.

    `messages` is the least number of transfers: one for each pair of ranks, or with `bucket_bytes` one for each
    bucket that a pair's bytes fill. `padding_bytes` lie in destination tensors and are sent by none.
    """
    traffic = plan.traffic * itemsize
    per_pair = traffic[traffic > 0]
    messages = -(-per_pair // bucket_bytes) if bucket_bytes else np.ones_like(per_pair)
    near: Counter[str] = Counter({"same_device": 0, "same_node": 0, "other": 0})
    for src, dst in plan.pairs:
        near[plan.near.distance(src, dst)] += int(traffic[src, dst])
    padding = sum(volume(box) for layout in plan.destinations for _, box in layout.fills)
    return {
        "digest": plan.digest,
        "sources": len(plan.sources),
        "destinations": len(plan.destinations),
        "tensors": len(np.unique(plan.dst.boxes.tensor)),
        "copies": len(plan.copies),
        "pairs": len(plan.pairs),
        "messages": int(messages.sum()),
        "bytes": int(traffic.sum()),
        "bytes_by_distance": dict(near),
        "egress_bytes": _spread([n * itemsize for n in plan.egress()]),
        "ingress_bytes": _spread([n * itemsize for n in plan.ingress()]),
        "padding_bytes": padding * itemsize,
    }


def tensor_traffic(plan: Plan, itemsize: int) -> list[TensorTraffic]:
    """One entry for each canonical tensor of the plan, in the order in which the layouts name them."""
    tensor_of_unit = plan.dst.boxes.tensor[plan.units.want]
    size = volumes(plan.units.box) * itemsize
    copies = np.zeros(len(plan.tensors), dtype=np.int64)
    moved = np.zeros(len(plan.tensors), dtype=np.int64)
    for delivery in plan.deliveries:
        tensor, ranks = tensor_of_unit[delivery.unit], len(delivery.nth)
        np.add.at(copies, tensor, ranks)
        np.add.at(moved, tensor, ranks * size[delivery.unit])
    sources, destinations = _local_names(plan.src), _local_names(plan.dst)
    return [
        TensorTraffic(name, sources[number], destinations[number], int(copies[number]), int(moved[number]))
        for number, name in enumerate(plan.tensors)
    ]


def report(plan: Plan, itemsize: int, most_pairs: int = 32, tensors: bool = False) -> list[str]:
    """Lines for people: the totals, each pair of ranks where there are no more than `most_pairs`, and on request
    each tensor with its names on both sides."""
    numbers = summary(plan, itemsize)
    lines = [
        f"{numbers['sources']} sources -> {numbers['destinations']} destinations, {numbers['tensors']} tensors, "
        f"{numbers['copies']} copies between {numbers['pairs']} pairs of ranks",
        f"moved     {size(numbers['bytes'])}, padding {size(numbers['padding_bytes'])}",
        f"near      {_near(numbers['bytes_by_distance'])}",
        f"sent      {_per_rank(numbers['egress_bytes'])}",
        f"received  {_per_rank(numbers['ingress_bytes'])}",
        f"digest    {numbers['digest'][:16]}",
    ]
    if len(plan.pairs) <= most_pairs:
        rows = [(f"{s} -> {d}", size(int(plan.traffic[s, d]) * itemsize)) for s, d in plan.pairs]
        lines += ["", *_columns([("ranks", "moved"), *rows])]
    if tensors:
        named = [
            (
                t.tensor,
                ", ".join(t.source_names),
                ", ".join(t.destination_names),
                str(t.copies),
                size(t.bytes),
            )
            for t in tensor_traffic(plan, itemsize)
        ]
        lines += ["", *_columns([("tensor", "source", "destination", "copies", "moved"), *named])]
    return lines


def size(n: float) -> str:
    """A number of bytes with a unit that fits it, in powers of 1000: 16382076928 is "16.4 GB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if n < 999.5:
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} TB"


def _spread(per_rank: Sequence[int]) -> dict[str, float]:
    mean = sum(per_rank) / len(per_rank) if per_rank else 0.0
    largest = max(per_rank, default=0)
    return {
        "min": min(per_rank, default=0),
        "mean": mean,
        "max": largest,
        "max_over_mean": largest / mean if mean else 1.0,
    }


def _local_names(side: Side) -> dict[int, tuple[str, ...]]:
    """The local tensors that hold each canonical tensor on one side, each once."""
    names: dict[int, dict[str, None]] = defaultdict(dict)
    for table in side.tables:
        local = list(table.layout.shapes)
        pairs = np.unique(np.stack([table.tensor, table.local], axis=1), axis=0)
        for tensor, position in pairs.tolist():
            names[tensor][local[position]] = None
    return {tensor: tuple(found) for tensor, found in names.items()}


def _near(by_distance: dict[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {size(n)}" for name, n in by_distance.items())


def _per_rank(spread: dict[str, float]) -> str:
    return (
        f"{size(spread['min'])} to {size(spread['max'])} a rank, mean {size(spread['mean'])}, "
        f"largest/mean {spread['max_over_mean']:.3f}"
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
