"""Who sends what: sources send equally much as far as their holdings allow, and near ones are preferred."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout, Piece, slices
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, Rope
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.planner.assignment import share_out, water_fill
from grpo_mlm.layouts.vllm import vllm_layout

# Every size divides by four, so that no cut is uneven by itself; 512 tokens fill the padded vocabulary.
EVEN = ModelSpec("qwen3", 16, 4, 4, 4, 4, 32, 512, False, False, False, True, 1e-6, Rope(10000.0), 64)


def least_largest_load(plan: Plan) -> float:
    """The lower bound of the largest egress that no plan beats, element by element.

    For every set of sources: what only they have, spread over them. Sources with the same layout count as one, for
    they can share evenly.
    """
    shapes: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for layout in plan.destinations:
        for p in layout.pieces:
            ends = tuple(stop for _, stop in p.box)
            shapes[p.tensor] = tuple(map(max, shapes[p.tensor] or ends, ends))
    kinds = {id(layout): layout for layout in plan.sources}
    replicas = [sum(layout is kind for layout in plan.sources) for kind in kinds.values()]
    only = np.zeros(1 << len(kinds))
    held_by = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    wanted = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    for bit, kind in enumerate(kinds.values()):
        for p in kind.pieces:
            held_by[p.tensor][slices(p.box)] |= 1 << bit
    for layout in plan.destinations:
        for p in layout.pieces:
            wanted[p.tensor][slices(p.box)] += 1
    for name in shapes:
        only += np.bincount(held_by[name].ravel(), wanted[name].ravel(), len(only))
    sources = np.zeros(len(only))
    for bit, count in enumerate(replicas):  # sums over all subsets of every set
        index = np.flatnonzero(np.arange(len(only)) >> bit & 1)
        only[index] += only[index - (1 << bit)]
        sources[index] += count
    return float((only[1:] / sources[1:]).max())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp", "pp"), list(product([1, 2, 4], [1, 2, 4])))
def test_no_source_sends_more_than_it_must(tp: int, pp: int, tied: bool) -> None:
    """Largest egress at most 1.05 x the best there is, which is the mean but where stages hold unequal amounts."""
    spec = replace(EVEN, tied=tied)
    for dp, rollout_tp, engines in product([1, 2, 4], repeat=3):
        src = megatron_layouts(spec, MegatronParallel(tp, pp), dp)
        dst = [vllm_layout(spec, rollout_tp, rank) for rank in range(rollout_tp)] * engines
        plan = make_plan(src, dst)
        egress = plan.egress()
        mean = sum(egress) / len(src)
        best = least_largest_load(plan)
        assert best >= mean * 0.999
        assert max(egress) <= 1.05 * best, (dp, rollout_tp, engines, max(egress), best)
        if pp < 4:
            assert max(egress) <= 1.05 * mean, (dp, rollout_tp, engines, egress)


def test_a_tied_embedding_is_split_between_its_two_homes() -> None:
    """First and last stage have it under different names; each sends half of it to the one engine."""
    src = megatron_layouts(replace(EVEN, tied=True), MegatronParallel(1, 2), 1)
    plan = make_plan(src, [vllm_layout(replace(EVEN, tied=True), 1, 0)])
    sent: dict[str, int] = defaultdict(int)
    for copy in plan.copies:
        if copy.tensor == "model.embed_tokens.weight":
            sent[copy.src_local] += (copy.box[0][1] - copy.box[0][0]) * 16
    assert sum(sent.values()) == 512 * 16
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert sent[name] == pytest.approx(512 * 8, rel=0.05)


def whole(length: int = 64) -> Layout:
    return Layout({"x": (length,)}, (Piece("w", ((0, length),), "x", (0,)),))


def senders(plan: Plan, dst: int) -> set[int]:
    return {src for src, to in plan.pairs if to == dst}


def test_the_device_comes_before_the_node_and_the_node_before_the_load() -> None:
    src, dst = [whole()] * 4, [whole()] * 3
    devices = ["a0", "a1", "b0", "b1", "a1", "a2", "c0"]
    nodes = ["a", "a", "b", "b", "a", "a", "c"]
    plan = make_plan(src, dst, device_of=devices, node_of=nodes)
    assert senders(plan, 0) == {1}  # on its device
    assert senders(plan, 1) == {0}  # none on its device, 0 and 1 on its node; 1 is busy
    assert senders(plan, 2) == {2, 3}  # nothing near; 0 and 1 are busy
    assert plan.egress() == [64, 64, 32, 32]


def test_a_device_outside_the_holders_is_no_reason_to_leave_the_node() -> None:
    """The source on the destination's device lacks the tensor."""
    other = Layout({"y": (64,)}, (Piece("v", ((0, 64),), "y", (0,)),))
    both = Layout({**whole().shapes, **other.shapes}, (*whole().pieces, *other.pieces))
    plan = make_plan(
        [other, whole(), whole()], [both], device_of=["d", "e", "f", "d"], node_of=["n", "m", "n", "n"]
    )
    assert {(c.tensor, c.src) for c in plan.copies} == {("v", 0), ("w", 2)}


@pytest.mark.parametrize("what", ["device_of", "node_of"])
def test_names_for_too_few_ranks_are_refused(what: str) -> None:
    with pytest.raises(RunFailure, match=rf"{what} has 1 names, but there are 1 sources and 2 destinations"):
        make_plan([whole()], [whole()] * 2, **{what: ["a"]})


def test_one_destination_at_a_time_does_not_queue_at_one_source() -> None:
    """At the same point of their lists, two destinations read from different sources."""
    layers: dict[str, tuple[int, ...]] = {f"w{i}": (64,) for i in range(8)}
    layout = Layout(layers, tuple(Piece(name, ((0, 64),), name, (0,)) for name in layers))
    plan = make_plan([layout] * 2, [layout] * 2)
    first, second = ([c.src for c in plan.receives(dst)] for dst in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_water_filling_is_what_giving_to_the_least_loaded_one_by_one_gives(seed: int) -> None:
    draw = np.random.default_rng(seed)
    loads = draw.integers(0, 50, size=draw.integers(1, 9))
    units, volume = int(draw.integers(0, 40)), int(draw.integers(1, 9))
    counts = water_fill(loads, units, volume)
    by_hand = loads.copy()
    for _ in range(units):
        by_hand[by_hand.argmin()] += volume
    assert counts.sum() == units
    assert counts.min() >= 0
    filled = loads + counts * volume
    assert filled.max() == by_hand.max()


def loads_of(groups: Sequence[tuple[tuple[int, ...], int]], units: Sequence[int], sources: int) -> list[int]:
    loads = [0] * sources
    for (candidates, volume), shares in zip(groups, share_out(groups, np.array(units), sources), strict=True):
        for rank, share in zip(candidates, shares.tolist(), strict=True):
            loads[rank] += share * volume
    return loads


def test_a_chain_of_overlapping_candidates_evens_out() -> None:
    """No set has more than two of four sources, all the work lies at one end: it takes several rounds."""
    groups = [((0, 1), 1), ((1, 2), 1), ((2, 3), 1)]
    assert loads_of(groups, [600, 100, 100], 4) == pytest.approx([300, 300, 100, 100], abs=3)
    assert loads_of(groups, [350, 150, 300], 4) == pytest.approx([200, 200, 200, 200], abs=3)


def test_the_same_question_has_the_same_answer() -> None:
    groups = [((0, 1, 2), 7), ((1, 2), 5), ((0, 2), 3), ((2,), 11)]
    assert loads_of(groups, [30, 20, 10, 5], 3) == loads_of(groups, [30, 20, 10, 5], 3)
    assert sum(loads_of(groups, [30, 20, 10, 5], 3)) == 30 * 7 + 20 * 5 + 10 * 3 + 5 * 11
