"""The weights of a Megatron distributed checkpoint (`torch_dist`), read slice by slice: `store.py` for its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from grpo_mlm.bridge.dist_files import OpenFiles
from grpo_mlm.bridge.dist_format import Chunk, StoredTensor, read_index
from grpo_mlm.bridge.dist_items import ItemError, locate
from grpo_mlm.bridge.dist_runs import Run, Runs
from grpo_mlm.errors import NamesDiffer, UserError
from grpo_mlm.layouts.boxes import Box
from grpo_mlm.layouts.megatron_dist import DistLayout, is_model_key, stored_layout
from grpo_mlm.layouts.model import ModelSpec

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_BLOCK_BYTES = 4 << 20  # of whole rows of a chunk, where only some of their columns are wanted


class DistStore:
    """A checkpoint that is proven to be what config.json describes: names, shapes, dtypes, files long enough.

    The optimizer, states of random generators and modules' `_extra_state` are left aside. `skipped` are what
    `allow_missing`, glob patterns, lets pass: canonical tensors that are missing, and unknown keys; `keys_of` says
    under which key each would be stored.

    UserError as `read_index`, a file that is missing or cut short, a tensor that is not whole or no float. NamesDiffer
    as `stored_layout`.
    """

    layout: DistLayout

    def __init__(self, folder: Path, spec: ModelSpec, allow_missing: Sequence[str] = ()) -> None:
        self.folder = folder
        tensors = read_index(folder, is_model_key)
        shapes = {name: stored.shape for name, stored in tensors.items()}
        try:
            self.layout, self.keys_of = stored_layout(spec, shapes, allow_missing)
            self.skipped = tuple(sorted(self.keys_of))
        except NamesDiffer as error:
            raise NamesDiffer(f"{folder}: {error}") from error
        self._tensors = {name: tensors[name] for name in self.layout.shapes}
        _check_files(folder, self._tensors)
        self._runs = {name: _checked_runs(self, name) for name in self._tensors}
        self._places: dict[tuple[str, int], int] = {}  # by file and start of the chunk
        self._open = OpenFiles()

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
        for run in self._runs[name].meeting(top, bottom):
            first, last = max(run.first, top), min(run.last, bottom)
            a, b = max(run.left, left), min(run.right, right)
            if first < last and a < b:
                part = rows[first - top : last - top, a - left : b - left]
                self._read_run(name, run, first, a, part)
                filled += part.numel()
        if filled != out.numel():
            raise UserError(f"{self.folder}: chunks of {name} overlap or leave gaps in {box}")
        return out

    def _read_run(self, name: str, run: Run, first: int, left: int, out: Tensor) -> None:
        """Rows of the tensor from `first` on, columns from `left` on, all of `out`."""
        width = run.right - run.left
        row_bytes = width * out.itemsize
        path = self.folder / run.chunk.file
        at = self._place(name, run.chunk) + (run.row + first - run.first) * row_bytes
        if out.shape[1] == width and out.is_contiguous():
            self._open.read(path, at, out)
            return
        step = min(max(1, _BLOCK_BYTES // row_bytes), len(out))
        block = torch.empty((step, width), dtype=out.dtype)
        for start in range(0, len(out), step):
            n = min(step, len(out) - start)
            self._open.read(path, at + start * row_bytes, block[:n])
            columns = slice(left - run.left, left - run.left + out.shape[1])
            out[start : start + n] = block[:n, columns]

    def _place(self, name: str, chunk: Chunk) -> int:
        """Position of a chunk's first number in its file."""
        key = chunk.file, chunk.start
        if key not in self._places:
            path = self.folder / chunk.file
            try:
                handle = self._open.handle(path)
                self._places[key] = locate(handle, chunk.start, chunk.length, chunk.sizes, self.dtype(name))
            except (ItemError, OSError) as error:
                raise UserError(f"{path} is damaged at {name}, offsets {chunk.offsets}: {error}") from error
        return self._places[key]


def _checked_runs(store: DistStore, name: str) -> Runs:
    stored = store._tensors[name]
    if stored.dtype not in _DTYPES:
        raise UserError(
            f"{store.folder}: {name} is stored as {stored.dtype}; only float dtypes can be trained"
        )
    try:
        return Runs(stored, len(store.layout.shapes[name]))
    except ValueError as error:
        raise UserError(f"{store.folder}: {name} is not whole: {error}") from error


def _check_files(folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """UserError: a file is not there or ends before its last item."""
    sizes: dict[str, int] = {}
    for name, stored in tensors.items():
        for chunk in stored.chunks:
            if chunk.file not in sizes:
                try:
                    sizes[chunk.file] = (folder / chunk.file).stat().st_size
                except OSError as error:
                    raise UserError(
                        f"{folder / chunk.file} with {name} cannot be read: {error.strerror}"
                    ) from error
            if chunk.start + chunk.length > sizes[chunk.file]:
                raise UserError(
                    f"{folder / chunk.file} is cut short: {name}, offsets {chunk.offsets}, ends at byte "
                    f"{chunk.start + chunk.length} of {sizes[chunk.file]}"
                )
