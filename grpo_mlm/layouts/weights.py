"""One weight as both engines know it, and the cuts of it that they agree on.

A family lists its weights; a side (`megatron.py`, `vllm.py`) turns each into the part that one rank holds.
Where a side lays a kind out in its own way (the fused q, k, v) it brings its own cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box, Layout, Piece
from grpo_mlm.layouts.spec import ModelSpec

Shape = tuple[int, ...]
Kind = Literal["replicated", "vocab", "columns", "gate_up", "qkv"]


@dataclass(frozen=True)
class Weight:
    """A weight and the canonical tensors that it is made of.

    `place` is the layer that owns it (0-based in the whole model), or "embedding", or "head" (what follows the
    last layer). `megatron` has `{layer}` where the stage's own layer number goes; `vllm` is a full name.
    """

    kind: Kind
    place: int | Literal["embedding", "head"]
    canonical: tuple[tuple[str, Shape], ...]
    megatron: str
    vllm: str


@dataclass(frozen=True)
class Part:
    """What one rank holds of a weight: its local shape, the pieces that fill it, and padding."""

    shape: Shape
    pieces: tuple[Piece, ...]
    fills: tuple[Box, ...] = ()


Cut = Callable[[ModelSpec, Weight, str, int, int], Part]
"""(spec, weight, local name, tp, tp_rank) -> this rank's part."""


def full(shape: Shape) -> Box:
    """The box of a whole tensor."""
    return tuple((0, n) for n in shape)


def rows(shape: Shape, start: int, stop: int) -> Box:
    """Rows [start, stop) of a tensor."""
    return ((start, stop), *full(shape[1:]))


def share(n: int, parts: int, what: str) -> int:
    """n / parts; UserError where it does not divide."""
    if n % parts:
        raise UserError(f"{what} ({n}) cannot be cut into {parts} equal parts; choose a size that divides it")
    return n // parts


def padded(n: int, multiple: int) -> int:
    """The least multiple that holds n."""
    return -(-n // multiple) * multiple


def stack(local: str, segments: Iterable[tuple[str, Box]], window: tuple[int, int] | None = None) -> Part:
    """Rows `window` of canonical boxes laid end to end along dimension 0 (all rows without a window).

    Rows of the window past the last segment are padding. The boxes agree in all other dimensions.
    """
    segments = list(segments)
    total = sum(box[0][1] - box[0][0] for _, box in segments)
    low, high = window or (0, total)
    pieces, start = [], 0
    for tensor, ((first, last), *rest) in segments:
        stop = start + last - first
        a, b = max(low, start), min(high, stop)
        if a < b:
            box = ((first + a - start, first + b - start), *rest)
            pieces.append(Piece(tensor, box, local, (a - low, *(0 for _ in rest))))
        start = stop
    tail = tuple(stop - start for start, stop in segments[0][1][1:])
    shape = (high - low, *tail)
    padding = (rows(shape, max(total, low) - low, high - low),) if high > total else ()
    return Part(shape, tuple(pieces), padding)


def replicated(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """Every rank holds the whole tensor."""
    [(tensor, shape)] = weight.canonical
    return stack(local, [(tensor, full(shape))])


def columns(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """Row-parallel matrix [out, in]: each rank holds in/tp columns."""
    [(tensor, (n, width))] = weight.canonical
    each = share(width, tp, f"{tensor}: number of columns")
    box = ((0, n), (rank * each, (rank + 1) * each))
    return Part((n, each), (Piece(tensor, box, local, (0, 0)),))


def gate_up(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """[gate of the rank; up of the rank]: each component is cut by itself, so ranks do not concatenate."""
    each = share(spec.ffn, tp, f"{spec.family}: intermediate size")
    return stack(
        local, [(tensor, rows(shape, rank * each, (rank + 1) * each)) for tensor, shape in weight.canonical]
    )


def vocab(multiple: int) -> Cut:
    """Vocabulary rows, padded to a multiple of `multiple` and cut evenly; rows past the vocabulary are padding."""

    def cut(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
        [(tensor, shape)] = weight.canonical
        each = share(padded(shape[0], multiple), tp, f"{tensor}: padded vocabulary")
        return stack(local, [(tensor, full(shape))], (rank * each, (rank + 1) * each))

    return cut


def as_layout(parts: dict[str, Part]) -> Layout:
    """A rank's parts by local name, as its layout."""
    return Layout(
        shapes={name: part.shape for name, part in parts.items()},
        pieces=tuple(piece for part in parts.values() for piece in part.pieces),
        fills=tuple((name, box) for name, part in parts.items() for box in part.fills),
    )
