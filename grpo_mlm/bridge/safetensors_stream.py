"""Writes a safetensors file front to back, so that a file of any size needs no more memory than one write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from grpo_mlm.bridge.durable import NewFile
from grpo_mlm.bridge.safetensors_header import DTYPES
from grpo_mlm.errors import RunFailure

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Plain:
    """A tensor to be written."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * prod(self.shape)


def file_order(tensors: Mapping[str, Plain]) -> dict[str, Plain]:
    """The order of tensors in a file: wide dtypes first, or a reader would find tensors off their alignment."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def header_bytes(tensors: Mapping[str, Plain]) -> bytes:
    """Length and header of a file with these tensors in this order, padded to 8 bytes as the library does."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


class SafetensorsWriter:
    """Writes tensors that are known from the start in their order, each in as many parts as one likes.

    The file is whole when `close` has said so: RunFailure where elements are missing.
    """

    def __init__(self, file: NewFile, tensors: Mapping[str, Plain]) -> None:
        header = header_bytes(tensors)
        self._file = file
        self._end = len(header) + sum(tensor.nbytes for tensor in tensors.values())
        file.write(header)

    def write(self, values: Tensor) -> None:
        """The next elements: contiguous, in host memory, of the dtype of the tensor that they belong to."""
        self._file.write(values.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Nothing follows."""
        if self._file.nbytes != self._end:
            raise RunFailure(
                f"{self._file.path}: {self._file.nbytes} bytes written, its header means {self._end}"
            )
