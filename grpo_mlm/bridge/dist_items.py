"""Where the numbers of a stored item lie: each is a zip archive by `torch.save`, its storage in there uncompressed."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from math import prod
from typing import Any

import torch

_HEADER_BYTES = 30  # of a zip entry's local header, before its name and extra field
_MOST_TEXT = 1 << 16  # bytes of the description of a tensor
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
}


class ItemError(Exception):
    """What is wrong with an item."""


class Window(io.RawIOBase):
    """Bytes [start, start + length) of an open file as a file of its own; other readers are not disturbed."""

    def __init__(self, handle: int, start: int, length: int) -> None:
        self.handle, self.start, self.length, self.at = handle, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = max(0, {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence] + offset)
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.length - self.at)]
        n = os.preadv(self.handle, [view], self.start + self.at) if len(view) else 0
        self.at += n
        return n


class _ItemUnpickler(pickle.Unpickler):
    """Reads what `torch.save` says of one plain tensor as (dtype, elements, storage key, offset, size, stride)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _described
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and name in _STORAGES:
            return name
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no plain tensor needs")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, elements = pid
        if kind != "storage" or storage not in _STORAGES:
            raise pickle.UnpicklingError(f"its storage is {kind!r} {storage!r}")
        return _STORAGES[storage], int(elements), str(key)


def _described(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> tuple[Any, ...]:
    return (*storage, offset, tuple(size), tuple(stride))


def locate(handle: int, start: int, length: int, sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """Position in the file of the first number of the item at [start, start + length), a tensor of these sizes.

    ItemError: no archive, another tensor, or one that is not stored plainly.
    """
    return start + _locate(Window(handle, start, length), sizes, dtype)


def first_number(saved: bytes, sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    """The same of an item in memory."""
    return _locate(io.BytesIO(saved), sizes, dtype)


def _locate(item: Window | io.BytesIO, sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    try:
        with zipfile.ZipFile(item) as archive:
            root = archive.infolist()[0].filename.split("/")[0]
            if _text(archive, f"{root}/byteorder") != b"little":
                raise ItemError("its numbers are not little-endian")
            described = _ItemUnpickler(io.BytesIO(_text(archive, f"{root}/data.pkl"))).load()
            _check(described, sizes, dtype)
            entry = archive.getinfo(f"{root}/data/{described[2]}")
    except (zipfile.BadZipFile, KeyError, IndexError, EOFError) as error:
        raise ItemError(f"it is no archive by torch.save: {error}") from error
    except pickle.UnpicklingError as error:
        raise ItemError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ItemError(f"its description of the tensor is damaged: {error}") from error
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != prod(sizes) * dtype.itemsize:
        raise ItemError(
            f"its storage has {entry.file_size} bytes, not {prod(sizes) * dtype.itemsize} uncompressed"
        )
    item.seek(entry.header_offset)
    header = item.read(_HEADER_BYTES) or b""
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    first = entry.header_offset + _HEADER_BYTES + names
    if header[:4] != b"PK\x03\x04" or first + entry.file_size > item.seek(0, os.SEEK_END):
        raise ItemError("its storage does not lie inside of it")
    return first


def _text(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise ItemError(f"its {name} is larger than any description of a tensor")
    return archive.read(name)


def _check(described: Any, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(described, tuple) or len(described) != 6:
        raise ItemError("it holds no plain tensor")
    kind, elements, _, offset, size, stride = described
    if (kind, size) != (dtype, sizes):
        raise ItemError(f"it holds {kind} {size}, the index says {dtype} {sizes}")
    contiguous, step = [], 1
    for n in reversed(sizes):
        contiguous.append(step)
        step *= n
    odd = any(n > 1 and a != b for n, a, b in zip(sizes, stride, reversed(contiguous), strict=True))
    if offset != 0 or elements != step or odd:
        raise ItemError(f"its tensor is a view with strides {stride} of {elements} elements")
