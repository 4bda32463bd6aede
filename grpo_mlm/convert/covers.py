"""Where a store keeps each canonical tensor, once or several times, and how to read a block of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from grpo_mlm.bridge.store import TensorStore
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Box, Piece, intersect, slices, volume


@dataclass(frozen=True)
class Cover:
    """Pieces of stored tensors that together are one canonical tensor, each element once."""

    store: TensorStore
    pieces: tuple[Piece, ...]

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(dict.fromkeys(piece.local for piece in self.pieces))

    @property
    def dtype(self) -> torch.dtype:
        """The one that holds the values of all pieces."""
        return reduce(torch.promote_types, (self.store.dtype(name) for name in self.stored))

    def read(self, box: Box) -> Tensor:
        """A box of the canonical tensor, contiguous, in host memory."""
        found = [(piece, part) for piece in self.pieces if (part := intersect(piece.box, box))]
        if len(found) == 1:
            piece, part = found[0]
            return self.store.read(piece.local, _place(part, piece.box, piece.at)).to(self.dtype)
        block = torch.empty([stop - start for start, stop in box], dtype=self.dtype)
        corner = tuple(0 for _ in box)
        for piece, part in found:
            block[slices(_place(part, box, corner))] = self.store.read(
                piece.local, _place(part, piece.box, piece.at)
            )
        return block


def covers(store: TensorStore, same: dict[str, str]) -> dict[str, list[Cover]]:
    """Each canonical tensor's covers: one, or more where it is stored again (a tied head written out).

    `same` maps names of canonical tensors onto those of others that they must equal. RunFailure where a store holds
    only a part of a tensor.
    """
    homes: dict[str, dict[tuple[str, str], list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in store.layout.pieces:
        homes[same.get(piece.tensor, piece.tensor)][piece.tensor, piece.local].append(piece)
    return {tensor: _covers_of(store, tensor, list(parts.values())) for tensor, parts in homes.items()}


def _covers_of(store: TensorStore, tensor: str, parts: list[list[Piece]]) -> list[Cover]:
    """Stored tensors that do not overlap are parts of one cover."""
    found: list[list[Piece]] = []
    for part in parts:
        for cover in found:
            if not any(intersect(a.box, b.box) for a in part for b in cover):
                cover += part
                break
        else:
            found.append(list(part))
    sizes = {sum(volume(piece.box) for piece in cover) for cover in found}
    if len(sizes) > 1:
        raise RunFailure(f"{store.folder}: {tensor} is stored in part only")
    return [Cover(store, tuple(cover)) for cover in found]


def _place(part: Box, box: Box, at: tuple[int, ...]) -> Box:
    """Where a part of `box` lies when the box's corner is at `at`."""
    return tuple(
        (low - start + a, high - start + a) for (low, high), (start, _), a in zip(part, box, at, strict=True)
    )
