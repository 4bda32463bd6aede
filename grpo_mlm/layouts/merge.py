"""The same layout in fewer pieces."""

from __future__ import annotations

from collections.abc import Iterable

from grpo_mlm.layouts.boxes import Piece


def merge_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces sorted by where they lie; those that continue one another, on both sides alike, are one.

    Two layouts that mean the same and cut along one axis only come out equal.
    """
    merged: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: (piece.local, piece.at)):
        joint = _joined(merged[-1], piece) if merged else None
        if joint is None:
            merged.append(piece)
        else:
            merged[-1] = joint
    return tuple(merged)


def _joined(a: Piece, b: Piece) -> Piece | None:
    """Both as one piece, where they differ along one axis only and `b` goes on where `a` ends; else None."""
    if (a.tensor, a.local) != (b.tensor, b.local):
        return None
    both = zip(a.box, b.box, a.local_box, b.local_box, strict=True)
    moved = [axis for axis, (x, y, at_x, at_y) in enumerate(both) if x != y or at_x != at_y]
    if len(moved) != 1:
        return None
    [axis] = moved
    if a.box[axis][1] != b.box[axis][0] or a.local_box[axis][1] != b.local_box[axis][0]:
        return None
    box = (*a.box[:axis], (a.box[axis][0], b.box[axis][1]), *a.box[axis + 1 :])
    return Piece(a.tensor, box, a.local, a.at)
