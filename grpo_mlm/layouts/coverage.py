"""Proofs about boxes: what is left of a box after others, and that a layout fills each element exactly once."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from grpo_mlm.layouts.boxes import Box, Layout, intersect, matrix_shape, volume
from grpo_mlm.layouts.piece_table import (
    Ints,
    PieceTable,
    meeting,
    rectangles,
    shape_rows,
    sums,
    tabulate,
    volumes,
)


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without its sub-box `hole`, as disjoint boxes."""
    rest = []
    for axis, ((start, stop), (a, b)) in enumerate(zip(box, hole, strict=True)):
        for low, high in ((start, a), (b, stop)):
            if low < high:
                rest.append((*hole[:axis], (low, high), *box[axis + 1 :]))
    return rest


def layout_faults(layout: Layout) -> list[str]:
    """Why a layout does not fill every element of its local tensors exactly once; empty when it does."""
    return table_faults(tabulate(layout, {}))


def table_faults(table: PieceTable) -> list[str]:
    """As `layout_faults`, of a layout whose pieces are already in arrays."""
    layout = table.layout
    known = layout.shapes.keys()
    named = [*(piece.local for piece in layout.pieces), *(name for name, _ in layout.fills)]
    faults = [f"{name}: has pieces but no shape" for name in dict.fromkeys(named) if name not in known]
    names = list(layout.shapes)
    doubtful = {names[i] for i in _doubtful(table).tolist()}
    boxes: dict[str, list[Box]] = defaultdict(list)
    if doubtful:  # look closely at these, for they are few
        for piece in layout.pieces:
            if piece.local in doubtful:
                boxes[piece.local].append(piece.local_box)
        for name, box in layout.fills:
            boxes[name].append(box)
    for name in names:
        fault = _tensor_fault(layout.shapes[name], boxes.get(name, [])) if name in doubtful else None
        if fault:
            faults.append(f"{name}: {fault}")
    return faults


def _doubtful(table: PieceTable) -> Ints:
    """Positions of the local tensors of which it is not certain that each element is filled exactly once."""
    layout = table.layout
    position = {name: i for i, name in enumerate(layout.shapes)}
    fills = [(position[name], box) for name, box in layout.fills if name in position]
    local = np.concatenate([table.local, np.array([i for i, _ in fills], dtype=np.int64)])
    box = np.concatenate([table.local_box, rectangles(box for _, box in fills)])
    dimensions = np.array(
        [len(layout.pieces[i].box) for i in table.piece.tolist()] + [len(box) for _, box in fills],
        dtype=np.int64,
    )
    order = np.lexsort((*box.T[::-1], local))
    order = order[local[order] >= 0]
    local, box, dimensions = local[order], box[order], dimensions[order]

    shapes = shape_rows(layout.shapes.values())
    rows, columns, dimensions_of_shape = shapes[local].T
    inside = (box[:, 0] >= 0) & (box[:, 0] < box[:, 1]) & (box[:, 1] <= rows)
    inside &= (box[:, 2] >= 0) & (box[:, 2] < box[:, 3]) & (box[:, 3] <= columns)
    inside &= (dimensions == dimensions_of_shape) & (dimensions <= 2)
    filled = sums(volumes(box), local, len(shapes))
    short = np.flatnonzero(filled != shapes[:, 0] * shapes[:, 1])
    return np.unique(np.concatenate([local[~inside], short, meeting(local, box)]))


def _tensor_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    if len(shape) > 2:
        return f"shape {shape} has more than two dimensions; a layout sees it as {matrix_shape(shape)}"
    for box in boxes:
        inside = len(box) == len(shape) and all(0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True))
        if not inside:
            return f"box {box} does not lie in shape {shape}"
    boxes = sorted(boxes)
    for i, box in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if other[0][0] >= box[0][1]:  # sorted by the first row: none further overlaps
                break
            if intersect(box, other):
                return f"filled twice in {intersect(box, other)}"
    whole = tuple((0, n) for n in shape)
    missing = volume(whole) - sum(map(volume, boxes))
    return f"{missing} of {volume(whole)} elements are filled by nothing" if missing else None
