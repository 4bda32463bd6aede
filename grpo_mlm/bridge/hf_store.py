"""The weights of a Hugging Face folder, read slice by slice: `store.py` for safetensors files.

Files are read by `pread`, not mapped: pages of a mapped file count as this process's memory while it reads them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from grpo_mlm.bridge.dist_files import OpenFiles
from grpo_mlm.bridge.hf_index import stored_tensors
from grpo_mlm.bridge.safetensors_header import DTYPES, Stored
from grpo_mlm.errors import NamesDiffer, UserError
from grpo_mlm.layouts.boxes import Box, Layout, volume
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.model import ModelSpec

_BLOCK_BYTES = 4 << 20  # of whole rows, where only some of their columns are wanted


class HFStore:
    """Safetensors files that are proven to be what config.json describes: names, shapes, dtypes.

    `skipped` are the names that differ and that `allow_missing`, glob patterns, let pass: tensors of the model that
    are not there, and stored ones that the model has no use for. Both are no part of `layout`.

    UserError as `stored_tensors`, or a tensor of a wrong shape or quantised. NamesDiffer: tensors missing or
    unknown. Rotary tables that old tools wrote are ignored.
    """

    def __init__(self, folder: Path, spec: ModelSpec, allow_missing: Sequence[str] = ()) -> None:
        self.folder = folder
        stored = stored_tensors(folder)
        layout = hf_layout(spec, stored.keys())
        self.skipped = _check_names(folder, spec, layout, stored.keys(), allow_missing)
        self.layout = without(layout, self.skipped)
        self._stored = {name: stored[name] for name in self.layout.shapes}
        for name, shape in self.layout.shapes.items():
            _check_tensor(name, self._stored[name], file_shape(spec, name, shape))
        # Files hold every canonical tensor whole; a tied head comes after the embedding that it repeats.
        self._homes = {piece.tensor: piece for piece in reversed(self.layout.pieces)}
        self._open = OpenFiles()

    def dtype(self, name: str) -> torch.dtype:
        """Of one stored tensor."""
        return DTYPES[self._stored[name].dtype]

    def read(self, name: str, box: Box) -> Tensor:
        """That part of a stored tensor in its matrix form, contiguous. UserError where the file is cut short."""
        stored, shape = self._stored[name], self.layout.shapes[name]
        out = torch.empty([stop - start for start, stop in box], dtype=self.dtype(name))
        if not out.numel():
            return out
        (top, bottom), width = box[0], volume(((0, 1), *((0, n) for n in shape[1:])))
        row_bytes = width * out.itemsize
        if len(box) == 1 or box[1] == (0, width):
            self._open.read(stored.path, stored.start + top * row_bytes, out)
            return out
        step = max(1, _BLOCK_BYTES // row_bytes)
        rows = torch.empty((min(step, bottom - top), width), dtype=out.dtype)
        for row in range(top, bottom, step):
            n = min(step, bottom - row)
            self._open.read(stored.path, stored.start + row * row_bytes, rows[:n])
            out[row - top : row - top + n] = rows[:n, slice(*box[1])]
        return out

    def read_canonical(self, tensor: str, box: Box) -> Tensor:
        """That part of a canonical tensor, wherever it is stored."""
        home = self._homes[tensor]
        return self.read(home.local, tuple((at + a, at + b) for at, (a, b) in zip(home.at, box, strict=True)))

    def files(self) -> list[Path]:
        """The files with the weights, in order."""
        return sorted({stored.path for stored in self._stored.values()})


def file_shape(spec: ModelSpec, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor of `hf_layout` has in the files: experts in one tensor have an axis of their own."""
    if spec.moe is not None and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return (spec.moe.experts, shape[0] // spec.moe.experts, *shape[1:])
    return shape


def without(layout: Layout, names: Collection[str]) -> Layout:
    """The layout less these local tensors."""
    names = set(names)
    return Layout(
        shapes={name: shape for name, shape in layout.shapes.items() if name not in names},
        pieces=tuple(piece for piece in layout.pieces if piece.local not in names),
        fills=tuple(fill for fill in layout.fills if fill[0] not in names),
    )


def some(names: Sequence[str]) -> str:
    """A list of names short enough for a message."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_names(
    folder: Path, spec: ModelSpec, layout: Layout, stored: Collection[str], allow_missing: Sequence[str]
) -> tuple[str, ...]:
    """Names that differ and are allowed to; NamesDiffer lists those that are not."""
    ignored = {name for name in stored if name.endswith("rotary_emb.inv_freq")}
    problems: list[str] = []
    skipped: list[str] = []
    for what, names in (
        ("missing", layout.shapes.keys() - stored),
        ("not in this model", stored - layout.shapes.keys() - ignored),
    ):
        allowed = {name for name in names if any(fnmatchcase(name, pattern) for pattern in allow_missing)}
        skipped += sorted(allowed)
        if names - allowed:
            problems.append(f"{what}: {some(sorted(names - allowed))}")
    if problems:
        raise NamesDiffer(
            f"{folder}: the weights do not match config.json ({spec.family}); {'; '.join(problems)}"
        )
    return tuple(skipped)


def _check_tensor(name: str, stored: Stored, wanted: tuple[int, ...]) -> None:
    """UserError: of another shape than config.json means, or quantised."""
    if stored.shape != wanted:
        raise UserError(f"{stored.path}: {name} has shape {stored.shape}, config.json means {wanted}")
    if stored.dtype not in DTYPES:
        raise UserError(
            f"{stored.path}: {name} is stored as {stored.dtype}; only {', '.join(DTYPES)} can be trained"
        )
