"""Writes and reads whole distributed checkpoints of small models by the pieces of their layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mlm.bridge.dist_store import DistStore
from grpo_mlm.bridge.dist_writer import item_record, plan_files, write_item, write_metadata
from grpo_mlm.layouts.boxes import Layout, slices
from grpo_mlm.layouts.megatron_dist import dist_layout
from grpo_mlm.layouts.model import ModelSpec

Tensors = dict[str, Tensor]


def held(layout: Layout, weights: Tensors) -> Tensors:
    """The layout's tensors; padding is zero."""
    dtype = next(iter(weights.values())).dtype
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        tensors[piece.local][slices(piece.local_box)] = weights[piece.tensor][slices(piece.box)]
    return tensors


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    weights: Tensors,
    item_bytes: int = 1 << 13,
    file_bytes: int = 1 << 17,
    **how: Any,
) -> None:
    """All canonical tensors, by the writer; small items and files by default."""
    layout = dist_layout(spec, **how)
    tensors = held(layout, weights)
    records = []
    folder.mkdir(parents=True)
    for file in plan_files(layout, {name: t.dtype for name, t in tensors.items()}, item_bytes, file_bytes):
        with (folder / file.name).open("wb") as stream:
            for item in file.items:
                part = tensors[item.tensor][slices(item.box)]
                records.append(item_record(file, item, part.dtype, *write_item(stream, item, part)))
    write_metadata(folder, records)


def read_checkpoint(store: DistStore) -> Tensors:
    """All canonical tensors, piece by piece; where two pieces hold the same, they must be equal."""
    tensors: Tensors = {}
    extents: dict[str, list[int]] = {}
    for piece in store.layout.pieces:
        ends = [stop for _, stop in piece.box]
        extents[piece.tensor] = [
            max(a, b) for a, b in zip(ends, extents.get(piece.tensor, ends), strict=True)
        ]
    for piece in store.layout.pieces:
        part = store.read(piece.local, piece.local_box)
        assert part.is_contiguous()
        empty = torch.full(extents[piece.tensor], torch.nan, dtype=part.dtype)
        target = tensors.setdefault(piece.tensor, empty)[slices(piece.box)]
        assert target.isnan().all() or torch.equal(target, part), piece
        target.copy_(part)
    return tensors


def assert_equal(actual: Tensors, wanted: Tensors) -> None:
    """Same names, and every tensor bit-equal."""
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name


def hub_tensors(folder: Path) -> Tensors:
    """The tensors of a Hugging Face folder by name."""
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
