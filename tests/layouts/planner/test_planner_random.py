"""Plans between random layouts, followed element by element by a reference that knows no boxes of theirs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from grpo_mlm.layouts.boxes import Box, Layout, Piece, slices, volume
from grpo_mlm.layouts.planner import Plan, PlanError, make_plan

SHAPES: dict[str, tuple[int, ...]] = {"a": (7, 9), "b": (12,), "c": (5, 1), "d": (1, 6), "e": (8, 8)}
NOTHING = -1


def random_cut(draw: random.Random, box: Box) -> list[Box]:
    """The box in disjoint parts, cut again and again anywhere."""
    axes = [i for i, (a, b) in enumerate(box) if b - a > 1]
    if not axes or draw.random() < 0.35:
        return [box]
    axis = draw.choice(axes)
    start, stop = box[axis]
    at = draw.randrange(start + 1, stop)
    low, high = ((*box[:axis], side, *box[axis + 1 :]) for side in ((start, at), (at, stop)))
    return [*random_cut(draw, low), *random_cut(draw, high)]


def random_side(draw: random.Random, ranks: int) -> list[Layout]:
    """Layouts that hold every element at least once: each rank cuts in its own way, some are replicas."""
    distinct = draw.randint(1, ranks)
    held: list[list[tuple[str, Box]]] = [[] for _ in range(distinct)]
    for tensor, shape in SHAPES.items():
        whole = tuple((0, n) for n in shape)
        for box in random_cut(draw, whole):
            held[draw.randrange(distinct)].append((tensor, box))
        for layout in held:
            if draw.random() < 0.4:  # holds more than its part, even twice
                layout += [(tensor, box) for box in random_cut(draw, whole) if draw.random() < 0.6]
    layouts = [local_tensors(draw, boxes) for boxes in held]
    return [*layouts, *(draw.choice(layouts) for _ in range(ranks - distinct))]


def local_tensors(draw: random.Random, boxes: Sequence[tuple[str, Box]]) -> Layout:
    """Each box below some padding in a local tensor of its own."""
    shapes, pieces, fills = {}, [], []
    for i, (tensor, box) in enumerate(boxes):
        name, padding = f"local{i}", draw.randint(0, 2)
        (rows, *rest) = (stop - start for start, stop in box)
        shapes[name] = (rows + padding, *rest)
        pieces.append(Piece(tensor, box, name, (padding, *(0 for _ in rest))))
        if padding:
            fills.append((name, ((0, padding), *((0, n) for n in rest))))
    draw.shuffle(pieces)
    return Layout(shapes, tuple(pieces), tuple(fills))


def held(layout: Layout, numbered: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's tensors where every element of every canonical tensor has a number of its own."""
    tensors = {name: np.full(shape, NOTHING) for name, shape in layout.shapes.items()}
    for p in layout.pieces:
        tensors[p.local][slices(p.local_box)] = numbered[p.tensor][slices(p.box)]
    return tensors


def numbered() -> dict[str, np.ndarray]:
    start, numbers = 0, {}
    for name, shape in SHAPES.items():
        numbers[name] = start + np.arange(int(np.prod(shape))).reshape(shape)
        start += numbers[name].size
    return numbers


def check(plan: Plan) -> None:
    """Every wanted element is written once, with what it should be; padding is not touched."""
    sources = [held(layout, numbered()) for layout in plan.sources]
    for rank, layout in enumerate(plan.destinations):
        got = {name: np.full(shape, NOTHING) for name, shape in layout.shapes.items()}
        times = {name: np.zeros(shape, int) for name, shape in layout.shapes.items()}
        for c in plan.receives(rank):
            assert c.dst == rank
            assert volume(c.box) == volume(c.src_box) == volume(c.dst_box) > 0
            moved = sources[c.src][c.src_local][slices(c.src_box)]
            assert (moved == numbered()[c.tensor][slices(c.box)]).all()
            got[c.dst_local][slices(c.dst_box)] = moved
            times[c.dst_local][slices(c.dst_box)] += 1
        for name, wanted in held(layout, numbered()).items():
            assert (got[name] == wanted).all()
            assert (times[name] == (wanted != NOTHING)).all()


def least_largest_load(plan: Plan) -> float:
    """No plan's busiest source sends less: for every set of sources, what only they have, spread over them."""
    ranks = len(plan.sources)
    holders = np.zeros(sum(n.size for n in numbered().values()), int)
    for rank, layout in enumerate(plan.sources):
        for tensor in held(layout, numbered()).values():
            holders[np.unique(tensor[tensor != NOTHING])] |= 1 << rank
    wanted = np.concatenate(
        [tensor.ravel() for layout in plan.destinations for tensor in held(layout, numbered()).values()]
    )
    sets = holders[wanted[wanted != NOTHING]]
    return max(float((sets & ~group == 0).sum() / group.bit_count()) for group in range(1, 1 << ranks))


@pytest.mark.parametrize("seed", range(60))
def test_every_wanted_element_comes_once_from_a_place_that_has_it(seed: int) -> None:
    draw = random.Random(seed)
    src, dst = (random_side(draw, draw.randint(1, 5)) for _ in range(2))
    plan = make_plan(src, dst)
    check(plan)
    # Units are whole elements, and shares of these tiny tensors have few of them.
    assert max(plan.egress()) <= 1.05 * least_largest_load(plan) + 1


@pytest.mark.parametrize("seed", range(30))
def test_elements_that_one_side_lacks_are_named(seed: int) -> None:
    """One local tensor fewer on either side: an error names what it held, unless others have all of it."""
    draw = random.Random(1000 + seed)
    src, dst = (random_side(draw, 2) for _ in range(2))
    gone = draw.choice(src[0].pieces or src[1].pieces)
    left = [drop(layout, gone) for layout in src]
    still = {int(n) for layout in left for t in held(layout, numbered()).values() for n in t.ravel()}
    lost = {int(n) for n in numbered()[gone.tensor][slices(gone.box)].ravel()} - still
    if not lost:
        check(make_plan(left, dst))
        return
    with pytest.raises(PlanError, match=rf"\n  {gone.tensor} .* held by none"):
        make_plan(left, dst)
    with pytest.raises(PlanError, match=rf"\n  {gone.tensor} .* taken by no destination"):
        make_plan(dst, left)


def drop(layout: Layout, piece: Piece) -> Layout:
    """The layout without the local tensor of this piece."""
    if piece not in layout.pieces:
        return layout
    return Layout(
        {name: shape for name, shape in layout.shapes.items() if name != piece.local},
        tuple(p for p in layout.pieces if p.local != piece.local),
        tuple(fill for fill in layout.fills if fill[0] != piece.local),
    )
