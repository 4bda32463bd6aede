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


def stack(local: str, segments: Iterable[tuple[str, Box]], window: tuple[int, int] | None = None) -> Part:
    """Rows `window` of canonical boxes laid end to end along dimension 0 (all rows without a window).

    Rows of the window past the last segment are padding. The boxes agree in all other dimensions.
    """
    segments = list(segments)
    total = sum(height(box) for _, box in segments)
    low, high = window or (0, total)
    pieces, start = [], 0
    for tensor, box in segments:
        stop = start + height(box)
        a, b = max(low, start), min(high, stop)
        if a < b:
            at = (a - low, *(0 for _ in box[1:]))
            pieces.append(Piece(tensor, rows(box, a - start, b - start), local, at))
        start = stop
    tail = tuple(stop - start for start, stop in segments[0][1][1:])
    shape = (high - low, *tail)
    padding = (rows(full(shape), max(total, low) - low, high - low),) if high > total else ()
    return Part(shape, tuple(pieces), padding)


def pile(parts: Iterable[Part]) -> Part:
    """Parts of one local tensor laid end to end along dimension 0: the experts of a rank in one matrix."""
    parts = list(parts)
    pieces, fills, start = [], [], 0
    for part in parts:
        pieces += [Piece(p.tensor, p.box, p.local, (p.at[0] + start, *p.at[1:])) for p in part.pieces]
        fills += [rows(((start, start), *box[1:]), *box[0]) for box in part.fills]
        start += part.shape[0]
    return Part((start, *parts[0].shape[1:]), tuple(pieces), tuple(fills))


def replicated(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """Every rank holds the whole tensor."""
    return stack(local, weight.canonical)


def columns(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """Row-parallel matrix [out, in]: each rank holds in/tp columns."""
    [(tensor, (out, (first, last)))] = weight.canonical
    each = share(last - first, tp, f"{tensor}: number of columns")
    box = (out, (first + rank * each, first + (rank + 1) * each))
    return Part((height(box), each), (Piece(tensor, box, local, (0, 0)),))


def gate_up(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """[gate of the rank; up of the rank]: each component is cut by itself, so ranks do not concatenate."""
    segments = []
    for tensor, box in weight.canonical:
        each = share(height(box), tp, f"{spec.family}: intermediate size")
        segments.append((tensor, rows(box, rank * each, (rank + 1) * each)))
    return stack(local, segments)


def vocab(multiple: int) -> Cut:
    """Vocabulary rows, padded to a multiple of `multiple` and cut evenly; rows past the vocabulary are padding."""

    def cut(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
        [(tensor, box)] = weight.canonical
        each = share(padded(height(box), multiple), tp, f"{tensor}: padded vocabulary")
        return stack(local, weight.canonical, (rank * each, (rank + 1) * each))

    return cut


def as_layout(parts: dict[str, Part]) -> Layout:
    """A rank's parts by local name, as its layout."""
    return Layout(
        shapes={name: part.shape for name, part in parts.items()},
        pieces=tuple(piece for part in parts.values() for piece in part.pieces),
        fills=tuple((name, box) for name, part in parts.items() for box in part.fills),
    )
