"""The formats that a conversion writes: which files, what each holds, and the index that makes them one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import torch
from torch import Tensor

from grpo_mlm.bridge.dist_writer import FilePlan, item_record, plan_files, write_item, write_metadata
from grpo_mlm.bridge.durable import NewFile
from grpo_mlm.bridge.hf_index import pack_files, write_index
from grpo_mlm.bridge.hf_store import file_shape
from grpo_mlm.bridge.safetensors_stream import Plain, SafetensorsWriter
from grpo_mlm.convert.gather import Rows, row_blocks
from grpo_mlm.convert.journal import FileRecord
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.megatron_dist import DistLayout
from grpo_mlm.layouts.spec import ModelSpec

Format = Literal["hf", "torch_dist"]
DIST_FILE_BYTES = 256 << 20  # of a torch_dist file: small enough for several workers to share a small model
Blocks = Callable[[list[tuple[str, Rows]]], Iterator[Tensor]]
"""Rows of tensors -> their values, one after the other."""


class Target(Protocol):
    """One format. Its files can be written in any order, each by one thread."""

    def files(self) -> dict[str, int]:
        """Bytes of tensors in each file."""
        ...

    def write(self, name: str, stream: NewFile, blocks: Blocks) -> list[dict[str, Any]]:
        """One file's content; what `finish` needs to know of it, as JSON values."""
        ...

    def finish(self, folder: Path, records: Iterable[FileRecord]) -> None:
        """What makes one checkpoint of the files, onto the disk."""
        ...


class HFTarget:
    """Safetensors files and their index."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        dtypes: Mapping[str, torch.dtype],
        block_bytes: int,
        max_file_bytes: int,
    ) -> None:
        tensors = {
            name: Plain(dtypes[name], file_shape(spec, name, shape)) for name, shape in layout.shapes.items()
        }
        self._files = pack_files(tensors, max_file_bytes)
        self._layout, self._block_bytes = layout, block_bytes

    def files(self) -> dict[str, int]:
        return {file: sum(t.nbytes for t in tensors.values()) for file, tensors in self._files.items()}

    def write(self, name: str, stream: NewFile, blocks: Blocks) -> list[dict[str, Any]]:
        tensors = self._files[name]
        writer = SafetensorsWriter(stream, tensors)
        wanted = [
            (tensor, rows)
            for tensor, plain in tensors.items()
            for rows in row_blocks(self._layout.shapes[tensor], plain.dtype.itemsize, self._block_bytes)
        ]
        for values in blocks(wanted):
            writer.write(values)
        writer.close()
        return []

    def finish(self, folder: Path, records: Iterable[FileRecord]) -> None:
        write_index(folder, self._files)


class DistTarget:
    """A Megatron distributed checkpoint."""

    def __init__(
        self, layout: DistLayout, dtypes: Mapping[str, torch.dtype], item_bytes: int, max_file_bytes: int
    ) -> None:
        planned = plan_files(layout, dtypes, item_bytes, min(max_file_bytes, DIST_FILE_BYTES))
        self._files: dict[str, FilePlan] = {file.name: file for file in planned}
        self._dtypes = dtypes

    def files(self) -> dict[str, int]:
        return {file.name: file.nbytes for file in self._files.values()}

    def write(self, name: str, stream: NewFile, blocks: Blocks) -> list[dict[str, Any]]:
        file = self._files[name]
        records = []
        wanted = [(item.tensor, item.box[0]) for item in file.items]
        for item, values in zip(file.items, blocks(wanted), strict=True):
            offset, length = write_item(cast(BinaryIO, stream), item, values)
            records.append(item_record(file, item, self._dtypes[item.tensor], offset, length))
        return records

    def finish(self, folder: Path, records: Iterable[FileRecord]) -> None:
        items = list(chain.from_iterable(record.items for record in records))
        # Pickle writes a shared string as a reference. None is shared here: a resumed run writes the same bytes.
        write_metadata(folder, json.loads(json.dumps(items)))
