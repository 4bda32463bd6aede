"""Writes a Megatron distributed checkpoint as a stream, in pieces that a job can do in any order and redo.

    files = plan_files(layout, dtypes, max_item_bytes, max_file_bytes)
    for file in files:                                    # in any order, in threads
        with open(folder / file.name, "wb") as stream:
            for item in file.items:
                offset, length = write_item(stream, tensor of item.box)
                records.append(item_record(file, item, dtype, offset, length))
    write_metadata(folder, records)

Stock megatron-core loads it at any parallel sizes.
"""

from __future__ import annotations

import io
import json
import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from grpo_mlm.bridge.dist_items import first_number
from grpo_mlm.bridge.durable import sync
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Box, volume
from grpo_mlm.layouts.megatron_dist import DistLayout, extra_state_keys

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}

EXTRA_STATES = "__extra_states.distcp"
"""The file of what modules store beside their weights: nothing, once for all of them."""


@dataclass(frozen=True)
class Item:
    """What is written at a time: a box of a stored tensor, within one layer and one expert.

    `box` is in the layout's merged form, `offsets` and `sizes` say the same in the tensor's own axes. `shape` is
    that of the whole tensor.
    """

    tensor: str
    box: Box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FilePlan:
    """One file and its items in order; `nbytes` without the little that each item's wrapping takes."""

    name: str
    items: tuple[Item, ...]
    nbytes: int


def plan_files(
    layout: DistLayout, dtypes: Mapping[str, torch.dtype], max_item_bytes: int, max_file_bytes: int
) -> list[FilePlan]:
    """Cut all tensors of the checkpoint into items, and deal the items out to files, both in order.

    `dtypes`: of each tensor of the layout. An item is at most `max_item_bytes`, or one row; a file is at most
    `max_file_bytes`, or one item. The same arguments give the same plan.
    """
    groups: list[list[Item]] = []
    sizes: list[int] = []
    for name in layout.shapes:
        itemsize = dtypes[name].itemsize
        for item in _items(layout, name, max(1, max_item_bytes // itemsize)):
            nbytes = volume(item.box) * itemsize
            if not groups or sizes[-1] + nbytes > max_file_bytes:
                groups.append([])
                sizes.append(0)
            groups[-1].append(item)
            sizes[-1] += nbytes
    files = enumerate(zip(groups, sizes, strict=True))
    return [FilePlan(f"__{i}_0.distcp", tuple(items), nbytes) for i, (items, nbytes) in files]


def _items(layout: DistLayout, name: str, most: int) -> Iterator[Item]:
    """Runs of rows of `most` elements at most, none across the border of a layer or an expert."""
    merged, shape = layout.shapes[name], layout.stored[name]
    axes = len(shape) - len(merged)  # leading ones: layers, experts
    rows, width = shape[axes], prod(shape[axes + 1 :])
    step = max(1, most // width)
    for index, lead in enumerate(product(*map(range, shape[:axes]))):
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            box = ((index * rows + start, index * rows + stop), *((0, n) for n in merged[1:]))
            zeros = (0,) * (len(merged) - 1)
            yield Item(
                tensor=name,
                box=box,
                offsets=(*lead, start, *zeros),
                sizes=(*(1 for _ in lead), stop - start, *shape[axes + 1 :]),
                shape=shape,
            )


def write_item(stream: BinaryIO, item: Item, tensor: Tensor) -> tuple[int, int]:
    """Append one item to its file; (offset, length) of what was written. `tensor` has the shape of `item.box`."""
    offset = stream.tell()
    before, after = _wrapping(item.sizes, tensor.dtype)
    stream.write(before)
    stream.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    stream.write(after)
    return offset, stream.tell() - offset


@lru_cache(maxsize=1024)
def _wrapping(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the numbers of such a tensor.

    The archive's checksum of them is not theirs: torch.load does not look at it, computing it takes longer than writing
    the item, and the whole file's sha256 is in the manifest.
    """
    with torch.serialization.skip_data():  # leaves room for the numbers
        saved = _saved(torch.empty(sizes, dtype=dtype))
    nbytes = prod(sizes) * dtype.itemsize
    start = first_number(saved, sizes, dtype)
    return saved[:start], saved[start + nbytes :]


def item_record(file: FilePlan, item: Item, dtype: torch.dtype, offset: int, length: int) -> dict[str, Any]:
    """What the checkpoint's index needs to know of a written item, as JSON values."""
    return {
        "tensor": item.tensor,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(item.shape),
        "offsets": list(item.offsets),
        "sizes": list(item.sizes),
        "file": file.name,
        "offset": offset,
        "length": length,
    }


def write_metadata(folder: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """What makes a checkpoint of the written files: metadata.json, an empty common.pt, and last .metadata, the index.

    `records`: `item_record` of every item, in any order. RunFailure if they do not make whole tensors.
    """
    by_tensor: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        by_tensor[record["tensor"]].append(record)
    for name, items in by_tensor.items():
        _check_whole(name, items)
    _write(folder / "metadata.json", json.dumps(BACKEND).encode())
    _write(folder / "common.pt", _saved({}))
    nothing = _saved([None])
    _write(folder / EXTRA_STATES, nothing)
    _write(folder / ".metadata", pickle.dumps(_index(by_tensor, len(nothing))))


def _index(by_tensor: Mapping[str, list[Mapping[str, Any]]], nothing: int) -> Any:
    """torch.distributed.checkpoint's index; `nothing` is the length of the file that all extra states share."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # not at the top: slow to import
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, items in by_tensor.items():
        chunks = [ChunkStorageMetadata(torch.Size(x["offsets"]), torch.Size(x["sizes"])) for x in items]
        properties = TensorProperties(dtype=getattr(torch, items[0]["dtype"]))
        stored[name] = TensorStorageMetadata(properties, torch.Size(items[0]["shape"]), chunks)
        for i, x in enumerate(items):
            places[MetadataIndex(name, x["offsets"], i)] = _StorageInfo(x["file"], x["offset"], x["length"])
    for key in extra_state_keys({name: tuple(items[0]["shape"]) for name, items in by_tensor.items()}):
        stored[key] = BytesStorageMetadata()
        places[MetadataIndex(key)] = _StorageInfo(EXTRA_STATES, 0, nothing)
    return Metadata(state_dict_metadata=stored, storage_data=places)


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _check_whole(name: str, items: list[Mapping[str, Any]]) -> None:
    wanted, given = prod(items[0]["shape"]), sum(prod(x["sizes"]) for x in items)
    if given != wanted or len({tuple(x["offsets"]) for x in items}) != len(items):
        raise RunFailure(f"{name}: {len(items)} written items hold {given} of its {wanted} elements")
    kinds = {(x["dtype"], tuple(x["shape"])) for x in items}
    if len(kinds) != 1:
        raise RunFailure(f"{name}: its written items disagree about dtype or shape: {sorted(kinds)}")


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    sync(path)
