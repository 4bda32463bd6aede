"""The header of a safetensors file, read and checked without the library: which bytes are which tensor's.

The file is 8 bytes (little-endian length of the header), the header (a JSON object), the tensors' bytes back to back.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from grpo_mlm.errors import UserError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Of weights that can be trained."""
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file: its safetensors dtype, and its bytes [start, stop) of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, Stored]:
    """Every tensor of the file. UserError: no safetensors file, cut short, or tensors that overlap or leave it."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise _damaged(path, f"its header would have {length} bytes, the file has {size}")
            entries = json.loads(file.read(length))
    except OSError as error:
        raise _damaged(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _damaged(path, "its header is no JSON object")
    entries.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_places(path, tensors, 8 + length, size)
    return tensors


def _entry(path: Path, name: str, entry: Any, data: int) -> Stored:
    """`data`: where the tensors' bytes begin in the file."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = _ITEM_BITS[dtype] * prod(shape)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header describes {name} as {entry}") from error
    whole = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    if not whole or bits != 8 * (stop - start):
        raise _damaged(path, f"{name} ({dtype}, shape {shape}) does not fit its bytes {start} to {stop}")
    return Stored(path, dtype, shape, data + start, data + stop)


def _check_places(path: Path, tensors: dict[str, Stored], data: int, size: int) -> None:
    """UserError unless the tensors fill the file from `data` to its end `size`, without gap or overlap."""
    end, before = data, "the header"
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            what = "overlaps" if stored.start < end else "leaves a gap after"
            raise _damaged(path, f"{name} {what} {before}")
        end, before = stored.stop, name
    if end != size:
        what = "cut short" if size < end else "too long"
        raise _damaged(path, f"{what}: {size} bytes, its header means {end}; download or copy it again")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a readable safetensors file: {why}")
