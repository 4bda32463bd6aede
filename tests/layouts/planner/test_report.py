"""The summary and the lines of a plan whose numbers one can count by hand."""

from __future__ import annotations

import json

import pytest

from grpo_mlm.layouts.boxes import Layout, Piece
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.planner.report import report, size, summary, tensor_traffic

HALVES = [
    Layout({"mine": (2, 6)}, (Piece("w", ((start, start + 2), (0, 6)), "mine", (0, 0)),)) for start in (0, 2)
]
NORM = Layout({"norm": (6,)}, (Piece("n", ((0, 6),), "norm", (0,)),))
WHOLE = Layout(
    {"big": (5, 6), "norm.weight": (6,)},
    (Piece("w", ((0, 4), (0, 6)), "big", (0, 0)), Piece("n", ((0, 6),), "norm.weight", (0,))),
    (("big", ((4, 5), (0, 6))),),
)


def small() -> Plan:
    """Two halves and a norm to two wholes: 12 + 12 + 6 elements each, and 6 of padding."""
    devices = ["d0", "d1", "d2", "d0", "d9"]
    nodes = ["x", "x", "y", "x", "y"]
    return make_plan([*HALVES, NORM], [WHOLE] * 2, device_of=devices, node_of=nodes)


def test_the_summary_counts_what_a_hand_count_gives() -> None:
    numbers = summary(small(), itemsize=2, bucket_bytes=16)
    assert json.loads(json.dumps(numbers)) == numbers
    assert len(numbers.pop("digest")) == 64
    assert numbers == {
        "sources": 3,
        "destinations": 2,
        "tensors": 2,
        "copies": 6,
        "pairs": 6,
        "messages": 2 * (2 + 2 + 1),  # 24, 24 and 12 bytes in buckets of 16
        "bytes": 120,
        "bytes_by_distance": {"same_device": 24, "same_node": 24 + 12, "other": 12 + 2 * 24},
        "egress_bytes": {"min": 24, "mean": 40.0, "max": 48, "max_over_mean": 1.2},
        "ingress_bytes": {"min": 60, "mean": 60.0, "max": 60, "max_over_mean": 1.0},
        "padding_bytes": 24,
    }
    assert summary(small(), itemsize=2)["messages"] == 6


def test_each_tensor_has_its_names_on_both_sides() -> None:
    matrix, norm = tensor_traffic(small(), itemsize=4)
    assert (matrix.tensor, matrix.source_names, matrix.destination_names) == ("w", ("mine",), ("big",))
    assert (matrix.copies, matrix.bytes) == (4, 4 * 48)
    assert (norm.tensor, norm.source_names, norm.destination_names) == ("n", ("norm",), ("norm.weight",))
    assert (norm.copies, norm.bytes) == (2, 4 * 12)


def test_few_pairs_are_listed_and_many_are_not() -> None:
    text = "\n".join(report(small(), itemsize=2, tensors=True))
    assert "3 sources -> 2 destinations, 2 tensors, 6 copies between 6 pairs of ranks" in text
    assert "largest/mean 1.200" in text
    assert "2 -> 1  12 B" in text
    assert "w       mine    big          4       96 B" in text
    assert "2 -> 1" not in "\n".join(report(small(), itemsize=2, most_pairs=5))
    assert "mine" not in "\n".join(report(small(), itemsize=2))


def test_a_plan_that_moves_nothing_has_a_report() -> None:
    numbers = summary(make_plan([], []), 2)
    assert numbers["bytes"] == numbers["copies"] == 0
    assert report(make_plan([], []), 2)


@pytest.mark.parametrize(
    ("n", "shown"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (16_382_076_928, "16.4 GB"), (7e12, "7 TB")],
)
def test_sizes_have_a_unit_that_fits(n: float, shown: str) -> None:
    assert size(n) == shown
