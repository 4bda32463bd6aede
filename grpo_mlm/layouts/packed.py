"""A layout as plain lists of numbers and names, small enough to cross a process border with every join."""

from __future__ import annotations

from itertools import chain
from typing import Any

from grpo_mlm.layouts.boxes import Box, Layout, Piece


def pack_layout(layout: Layout) -> dict[str, Any]:
    """The layout as JSON values; each name is written once.

    A piece is the row [canonical name, local name, start and stop of each axis, corner of each axis], a fill the
    row [local name, start and stop of each axis]; names are numbers of `tensors` and of `shapes`.
    """
    local = {name: i for i, name in enumerate(layout.shapes)}
    canonical = {name: i for i, name in enumerate(dict.fromkeys(piece.tensor for piece in layout.pieces))}
    return {
        "shapes": [[name, *shape] for name, shape in layout.shapes.items()],
        "tensors": list(canonical),
        "pieces": [
            [canonical[piece.tensor], local[piece.local], *chain(*piece.box), *piece.at]
            for piece in layout.pieces
        ],
        "fills": [[local[name], *chain(*box)] for name, box in layout.fills],
    }


def unpack_layout(packed: dict[str, Any]) -> Layout:
    """The layout that `pack_layout` packed."""
    local = [name for name, *_ in packed["shapes"]]
    return Layout(
        shapes={name: tuple(shape) for name, *shape in packed["shapes"]},
        pieces=tuple(_piece(packed["tensors"], local, row) for row in packed["pieces"]),
        fills=tuple((local[name], _box(bounds)) for name, *bounds in packed["fills"]),
    )


def _piece(tensors: list[str], local: list[str], row: list[int]) -> Piece:
    tensor, name, *numbers = row
    axes = len(numbers) // 3  # two bounds and one corner an axis
    return Piece(tensors[tensor], _box(numbers[: 2 * axes]), local[name], tuple(numbers[2 * axes :]))


def _box(bounds: list[int]) -> Box:
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))
