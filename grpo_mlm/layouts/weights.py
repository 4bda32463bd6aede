"""One weight as both engines know it, and the cuts of it that they agree on.

A family lists its weights; a side (`megatron.py`, `vllm.py`) turns each into what one rank holds.
Where a side lays a kind out in its own way (the fused q, k, v) it brings its own cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box, Layout, Piece
from grpo_mlm.layouts.spec import ModelSpec

Shape = tuple[int, ...]
Kind = Literal["replicated", "vocab", "columns", "gate_up", "qkv"]


@dataclass(frozen=True)
class Weight:
    """A weight and the boxes of canonical tensors that it is made of.

    `place` is the layer that owns it (0-based in the whole model), or "embedding", or "head" (what follows the
    last layer). `megatron` has `{layer}` and `{expert}` where the rank's own numbers go; `vllm` is a full name, which
    all experts of a layer share. `expert` is the number of the expert that it belongs to, if any. `fp32`: it loses its
    meaning in a lower precision, so it stays float32 in a model of any dtype.
    """

    kind: Kind
    place: int | Literal["embedding", "head"]
    canonical: tuple[tuple[str, Box], ...]
    megatron: str
    vllm: str
    expert: int | None = None
    fp32: bool = False


class Stack(NamedTuple):
    """Boxes of canonical tensors laid end to end along dimension 0; a rank holds the rows `window` of it (None: all).

    Rows of the window past the last box are padding. The boxes agree in all other dimensions.
    """

    boxes: Sequence[tuple[str, Box]]
    window: tuple[int, int] | None = None


Cut = Callable[[ModelSpec, Weight, int, int], Stack]
"""(spec, weight, tp, tp_rank) -> what this rank holds of the weight."""


def full(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def rows(box: Box, start: int, stop: int) -> Box:
    """Rows [start, stop) of a box, counted from its first."""
    first = box[0][0]
    return ((first + start, first + stop), *box[1:])


def height(box: Box) -> int:
    """Number of rows."""
    return box[0][1] - box[0][0]


def share(n: int, parts: int, what: str) -> int:
    """n / parts; UserError where it does not divide."""
    if n % parts:
        raise UserError(f"{what} ({n}) cannot be cut into {parts} equal parts; choose a size that divides it")
    return n // parts


def padded(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple


def pile(stacks: Sequence[Stack]) -> Stack:
    """Whole stacks laid on one another: the experts of a rank in one matrix."""
    return stacks[0] if len(stacks) == 1 else Stack([box for stack in stacks for box in stack.boxes])


def replicated(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    """Every rank holds the whole tensor."""
    return Stack(weight.canonical)


def columns(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    """Row-parallel matrix [out, in]: each rank holds in/tp columns."""
    [(tensor, (out, (first, last)))] = weight.canonical
    each = share(last - first, tp, f"{tensor}: number of columns")
    return Stack([(tensor, (out, (first + rank * each, first + (rank + 1) * each)))])


def gate_up(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    """[gate of the rank; up of the rank]: each component is cut by itself, so ranks do not concatenate."""
    boxes = []
    for tensor, box in weight.canonical:
        each = share(height(box), tp, f"{spec.family}: intermediate size")
        boxes.append((tensor, rows(box, rank * each, (rank + 1) * each)))
    return Stack(boxes)


def vocab(multiple: int) -> Cut:
    """Vocabulary rows, padded to a multiple of `multiple` and cut evenly; rows past the vocabulary are padding."""

    def cut(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
        [(tensor, box)] = weight.canonical
        each = share(padded(height(box), multiple), tp, f"{tensor}: padded vocabulary")
        return Stack(weight.canonical, (rank * each, (rank + 1) * each))

    return cut


def as_layout(stacks: Mapping[str, Stack]) -> Layout:
    """What a rank holds by local name, as its layout."""
    shapes: dict[str, Shape] = {}
    pieces: list[Piece] = []
    fills: list[tuple[str, Box]] = []
    for name, (boxes, window) in stacks.items():
        total = sum(height(box) for _, box in boxes)
        low, high = window or (0, total)
        start = 0
        for tensor, box in boxes:
            stop = start + height(box)
            a, b = max(low, start), min(high, stop)
            if a < b:
                pieces.append(
                    Piece(tensor, rows(box, a - start, b - start), name, (a - low, *(0,) * (len(box) - 1)))
                )
            start = stop
        shape = shapes[name] = (high - low, *(stop - start for start, stop in boxes[0][1][1:]))
        if high > total:
            fills.append((name, rows(full(shape), max(total, low) - low, high - low)))
    return Layout(shapes, tuple(pieces), tuple(fills))
