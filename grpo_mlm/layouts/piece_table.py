"""A layout's pieces as arrays, so that hundreds of thousands of them are compared in numpy and not one by one.

A box is a row of four integers: first row, row end, first column, column end. A vector is a matrix of one column;
the number of dimensions is part of a tensor's identity here, so that the two never meet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_mlm.layouts.boxes import Box, Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Numbers = dict[tuple[str, int], int]
"""(canonical tensor, dimensions) -> its number, given out in the order of first appearance."""

_ONE = ((0, 1), (0, 1))  # the extents of dimensions that a tensor lacks


@dataclass(frozen=True)
class PieceTable:
    """All pieces of `layout`, by local tensor in the order of its shapes, then by place in it."""

    layout: Layout
    piece: Ints  # [n] index in layout.pieces
    tensor: Ints  # [n] number of the canonical tensor
    box: Ints  # [n, 4] in the canonical tensor
    local: Ints  # [n] position of the local tensor in layout.shapes, -1 where it has no shape
    local_box: Ints  # [n, 4] in the local tensor


def tabulate(layout: Layout, numbers: Numbers) -> PieceTable:
    """The pieces as arrays; canonical tensors that are new to `numbers` are added to it."""
    pieces = layout.pieces
    position = {name: i for i, name in enumerate(layout.shapes)}
    tensor = np.array(
        [numbers.setdefault((p.tensor, len(p.box)), len(numbers)) for p in pieces], dtype=np.int64
    )
    local = np.array([position.get(p.local, -1) for p in pieces], dtype=np.int64)
    box = rectangles(p.box for p in pieces)
    corner = np.array([(*p.at, 0, 0)[:2] for p in pieces], dtype=np.int64).reshape(-1, 2)
    height, width = box[:, 1] - box[:, 0], box[:, 3] - box[:, 2]
    local_box = np.stack([corner[:, 0], corner[:, 0] + height, corner[:, 1], corner[:, 1] + width], axis=1)
    order = np.lexsort((corner[:, 1], corner[:, 0], local))
    return PieceTable(layout, order, tensor[order], box[order], local[order], local_box[order])


def rectangles(boxes: Iterable[Box]) -> Ints:
    """Boxes of at most two dimensions as rows `[n, 4]`."""
    rows = [(*a, *b) for a, b, *_ in ((*box, *_ONE) for box in boxes)]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def as_box(row: Sequence[int], dimensions: int) -> Box:
    """A row of four integers as a box of so many dimensions, at most two."""
    r0, r1, c0, c1 = row
    return ((r0, r1), (c0, c1))[:dimensions]


def volumes(boxes: Ints) -> Ints:
    """Elements of each box: `[n, 4]` -> `[n]`."""
    elements: Ints = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
    return elements


def sums(values: Ints, groups: Ints, count: int) -> Ints:
    """Sum of `values` by group number, `[count]`; exact."""
    total = np.zeros(count, dtype=np.int64)
    np.add.at(total, groups, values)
    return total


def meeting(group: Ints, boxes: Ints) -> Ints:
    """Groups of which it is not certain that their boxes lie apart. Rows are sorted by group, then by box.

    Certain are bands: neighbours in this order either have the same rows and do not share a column, or the
    second starts below the end of the first. All cuts of tensors that we know look like this.
    """
    before, after = boxes[:-1], boxes[1:]
    below = after[:, 0] >= before[:, 1]
    beside = (after[:, :2] == before[:, :2]).all(axis=1) & (after[:, 2] >= before[:, 3])
    unsure = (group[1:] == group[:-1]) & ~below & ~beside
    return np.unique(group[1:][unsure])


def shape_rows(shapes: Iterable[tuple[int, ...]]) -> Ints:
    """Shapes of at most two dimensions as rows `[n, 3]`: rows, columns, dimensions."""
    rows = [(*(*shape, 1, 1)[:2], len(shape)) for shape in shapes]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)
