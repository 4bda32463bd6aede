"""Tensors that a source stores twice: both copies must be equal, or which one is taken would be chance."""

from __future__ import annotations

from collections import defaultdict

import torch

from grpo_mlm.bridge.store import TensorStore
from grpo_mlm.convert.gather import row_blocks
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Piece


def check_homes(store: TensorStore, block_bytes: int) -> None:
    """UserError, by name, where two copies differ: a head of its own in a model that says its embeddings are tied."""
    homes: dict[object, list[Piece]] = defaultdict(list)
    for piece in store.layout.pieces:
        homes[piece.tensor, piece.box].append(piece)
    for first, *others in homes.values():
        for other in others:
            if not _equal(store, first, other, block_bytes):
                raise UserError(
                    f"{store.folder}: {first.local} and {other.local} are the same tensor by config.json, but differ; "
                    "if the head is its own, set tie_word_embeddings to false there"
                )


def _equal(store: TensorStore, a: Piece, b: Piece, block_bytes: int) -> bool:
    if store.dtype(a.local) != store.dtype(b.local):
        return False
    shape = tuple(stop - start for start, stop in a.box)
    for start, stop in row_blocks(shape, store.dtype(a.local).itemsize, block_bytes):
        left, right = (
            store.read(piece.local, ((piece.at[0] + start, piece.at[0] + stop), *piece.local_box[1:]))
            for piece in (a, b)
        )
        if not torch.equal(left.view(torch.uint8), right.view(torch.uint8)):  # as bits: a NaN equals itself
            return False
    return True
