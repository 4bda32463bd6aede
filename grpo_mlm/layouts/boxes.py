"""The vocabulary of the layout algebra: boxes of canonical tensors and where they lie in local tensors.

Every weight has one canonical home, the Hugging Face tensor by name and shape. One rank's *layout* says which
boxes of which canonical tensors sit in which boxes of its own tensors. Everything else (loading, syncing,
exporting) is a join of two layouts; see `planner/`.
"""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[tuple[int, int], ...]
"""Half-open intervals, one a dimension: ((0, 4), (8, 16)) is rows 0-3 of columns 8-15."""


@dataclass(frozen=True, slots=True)
class Piece:
    """`box` of canonical `tensor` lies in local tensor `local` with its corner at `at` (same extents)."""

    tensor: str
    box: Box
    local: str
    at: tuple[int, ...]

    @property
    def local_box(self) -> Box:
        return tuple((a, a + stop - start) for a, (start, stop) in zip(self.at, self.box, strict=True))


@dataclass(frozen=True)
class Layout:
    """One rank's view: its tensors' shapes, the pieces that fill them, and the padding that nothing fills."""

    shapes: dict[str, tuple[int, ...]]
    pieces: tuple[Piece, ...]
    fills: tuple[tuple[str, Box], ...] = ()


def volume(box: Box) -> int:
    """Number of elements."""
    n = 1
    for start, stop in box:
        n *= stop - start
    return n


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None."""
    common = tuple((max(x0, y0), min(x1, y1)) for (x0, x1), (y0, y1) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def slices(box: Box) -> tuple[slice, ...]:
    """The box as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which layouts see a tensor of three or more dimensions: a matrix, leading dimensions merged."""
    if len(shape) <= 2:
        return tuple(shape)
    rows = 1
    for n in shape[:-1]:
        rows *= n
    return (rows, shape[-1])
