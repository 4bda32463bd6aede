"""The weights of a Megatron distributed checkpoint (`torch_dist`), read slice by slice: `store.py` for its files.

A stored tensor lies in chunks, boxes of any grid over any files. Every chunk is cut into runs: consecutive rows of the
tensor's merged form that are consecutive in the chunk too. A slice is read from the runs that it meets.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mlm.bridge.dist_format import Chunk, StoredTensor, read_index
from grpo_mlm.bridge.dist_items import ItemError, locate
from grpo_mlm.errors import NamesDiffer, UserError
from grpo_mlm.layouts.boxes import Box
from grpo_mlm.layouts.megatron_dist import is_model_key, stored_layout
from grpo_mlm.layouts.model import ModelSpec

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCK_BYTES = 4 << 20  # of whole rows of a chunk, where only some of their columns are wanted


class Run(NamedTuple):
    """Rows [first, last) of columns [left, right) of a tensor's merged form lie in `chunk` from its row `row` on."""

    first: int
    last: int
    left: int
    right: int
    chunk: Chunk
    row: int


class DistStore:
    """A checkpoint that is proven to be what config.json describes: names, shapes, dtypes, files there and long enough.

    `skipped` are the keys that `allow_missing`, glob patterns, let pass. UserError as `read_index`, or a file that is
    missing or cut short, or chunks that do not make a tensor. NamesDiffer as `stored_layout`.
    """

    def __init__(self, folder: Path, spec: ModelSpec, allow_missing: Sequence[str] = ()) -> None:
        self.folder = folder
        tensors = read_index(folder, is_model_key)
        try:
            shapes = {name: stored.shape for name, stored in tensors.items()}
            self.layout, self.skipped = stored_layout(spec, shapes, allow_missing)
        except NamesDiffer as error:
            raise NamesDiffer(f"{folder}: {error}") from error
        self._tensors = {name: tensors[name] for name in self.layout.shapes}
        _check_files(folder, self._tensors)
        self._runs: dict[str, list[Run]] = {}
        for name, stored in self._tensors.items():
            if stored.dtype not in _DTYPES:
                raise UserError(f"{folder}: {name} is stored as {stored.dtype}, which is no dtype that can be trained")
            self._runs[name] = sorted(_runs(stored, len(self.layout.shapes[name])), key=lambda run: run[:4])
        self._longest = {name: max(r.last - r.first for r in runs) for name, runs in self._runs.items()}
        self._located: dict[tuple[str, int], int] = {}
        self._open = _OpenFiles()

    def dtype(self, name: str) -> torch.dtype:
        """Of one stored tensor."""
        return self._tensors[name].dtype

    def files(self) -> list[Path]:
        """The files with the weights, in order."""
        names = {chunk.file for stored in self._tensors.values() for chunk in stored.chunks}
        return [self.folder / name for name in sorted(names)]

    def read(self, name: str, box: Box) -> Tensor:
        """That part of a stored tensor in its merged form, contiguous. UserError where a file is damaged."""
        out = torch.empty([stop - start for start, stop in box], dtype=self.dtype(name))
        (top, bottom), (left, right) = box if len(box) == 2 else (*box, (0, 1))
        rows = out.view(bottom - top, right - left)
        filled = 0
        for run in self._meeting(name, top, bottom):
            a, b = max(run.first, top), min(run.last, bottom)
            c, d = max(run.left, left), min(run.right, right)
            if a < b and c < d:
                self._read_run(name, run, a, (c, d), rows[a - top : b - top, c - left : d - left])
                filled += (b - a) * (d - c)
        if filled != out.numel():
            raise UserError(f"{self.folder}: the chunks of {name} hold {filled} of {out.numel()} elements of {box}")
        return out

    def _meeting(self, name: str, top: int, bottom: int) -> Iterator[Run]:
        """The runs with rows in [top, bottom), and few others."""
        runs = self._runs[name]
        for i in range(bisect_left(runs, top - self._longest[name], key=lambda run: run.first), len(runs)):
            if runs[i].first >= bottom:
                return
            yield runs[i]

    def _read_run(self, name: str, run: Run, first: int, columns: tuple[int, int], out: Tensor) -> None:
        """Rows of the tensor from `first` on, `columns` of them, into `out`."""
        path, width, itemsize = self.folder / run.chunk.file, run.right - run.left, out.itemsize
        handle = self._open.handle(path)
        at = self._locate(name, run.chunk, handle) + (run.row + first - run.first) * width * itemsize
        if out.is_contiguous() and columns == (run.left, run.right):
            _read_bytes(path, handle, at, out)
            return
        step = max(1, _BLOCK_BYTES // (width * itemsize))
        block = torch.empty((min(step, len(out)), width), dtype=out.dtype)
        for start in range(0, len(out), step):
            n = min(step, len(out) - start)
            _read_bytes(path, handle, at + start * width * itemsize, block[:n])
            out[start : start + n] = block[:n, columns[0] - run.left : columns[1] - run.left]

    def _locate(self, name: str, chunk: Chunk, handle: int) -> int:
        """Position of a chunk's first number in its file."""
        key = chunk.file, chunk.start
        if key not in self._located:
            try:
                self._located[key] = locate(handle, chunk.start, chunk.length, chunk.sizes, self.dtype(name))
            except (ItemError, OSError) as error:
                raise UserError(
                    f"{self.folder / chunk.file} is damaged where {name} {chunk.offsets} should be: {error}"
                ) from error
        return self._located[key]
