"""From a strided view of a row-major tensor to the box that it shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_mlm.layouts.boxes import Box


def strided_box(
    shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int]
) -> Box | None:
    """The box of a tensor of one or two dimensions that a view of it shows element by element, in order.

    `offset` and `strides` count elements of the whole tensor. None where the view is no box: transposed, expanded,
    with gaps, or going over the end of a row.
    """
    runs = _runs(sizes, strides)
    if len(shape) == 1:
        return _flat(offset, runs)
    width = shape[1]
    row, column = divmod(offset, width)
    match runs:
        case []:
            rows, columns = 1, 1
        case [(n, 1)] if column == 0 and n % width == 0:
            rows, columns = n // width, width
        case [(n, 1)]:
            rows, columns = 1, n
        case [(n, stride)] if stride == width:
            rows, columns = n, 1
        case [(n, stride), (m, 1)] if stride == width:
            rows, columns = n, m
        case _:
            return None
    return ((row, row + rows), (column, column + columns)) if column + columns <= width else None


def _flat(offset: int, runs: list[tuple[int, int]]) -> Box | None:
    if not runs:
        return ((offset, offset + 1),)
    [(n, stride), *more] = runs
    return ((offset, offset + n),) if stride == 1 and not more else None


def _runs(sizes: Iterable[int], strides: Iterable[int]) -> list[tuple[int, int]]:
    """(size, stride) of each dimension, without those of size 1, and merged where one continues the next."""
    runs: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs
