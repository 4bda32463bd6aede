"""Proofs about boxes: what is left of a box after others, and that a layout fills each element exactly once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from grpo_mlm.layouts.boxes import Box, Layout, intersect, volume


def subtract(box: Box, hole: Box) -> list[Box]:
    """`box` without its sub-box `hole`, as disjoint boxes."""
    rest = []
    for axis, ((start, stop), (a, b)) in enumerate(zip(box, hole, strict=True)):
        for low, high in ((start, a), (b, stop)):
            if low < high:
                rest.append((*hole[:axis], (low, high), *box[axis + 1 :]))
    return rest


def remainder(box: Box, covers: Iterable[Box]) -> list[Box]:
    """The parts of `box` that none of `covers` has; covers may overlap."""
    left = [box]
    for cover in covers:
        after: list[Box] = []
        for part in left:
            common = intersect(part, cover)
            after += [part] if common is None else subtract(part, common)
        left = after
        if not left:
            break
    return left


def layout_faults(layout: Layout) -> list[str]:
    """Why a layout does not fill every element of its local tensors exactly once; empty when it does."""
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in layout.pieces:
        boxes[piece.local].append(piece.local_box)
    for name, box in layout.fills:
        boxes[name].append(box)
    faults = [f"{name}: has pieces but no shape" for name in boxes.keys() - layout.shapes.keys()]
    for name, shape in layout.shapes.items():
        fault = _tensor_fault(shape, boxes.get(name, []))
        if fault:
            faults.append(f"{name}: {fault}")
    return faults


def _tensor_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
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
