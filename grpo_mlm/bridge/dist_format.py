"""The index of a Megatron distributed checkpoint, read without running anything that it says.

`.metadata` is a pickle. The unpickler here builds inert records for the few classes that such an index consists of,
and refuses every other name, so a file from a stranger can do nothing but be refused.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from grpo_mlm.errors import UserError

INDEX, BACKEND_FILE = ".metadata", "metadata.json"

_DCP = "torch.distributed.checkpoint."
_RECORDS = {
    _DCP
    + "metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties "
    "MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    _DCP + "filesystem": "_StorageInfo _StoragePrefix",
    _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
}


class Record:
    """An instance of a class of the index: its fields, none of its methods."""

    fields: Any

    def __new__(cls, *args: Any) -> Record:
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def __hash__(self) -> int:  # keys of dicts are hashed before their fields are known
        return id(self)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


class IndexUnpickler(pickle.Unpickler):
    """`pickle.Unpickler` that makes records, sizes and dtypes, and raises UnpicklingError at any other name."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, "").split():
            return Record
        if (module, name) == ("torch", "Size"):
            return _size
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _nothing
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of a checkpoint needs")


def _size(numbers: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in numbers)


def _nothing(*args: Any) -> None: ...


@dataclass(frozen=True)
class Chunk:
    """A box of a stored tensor, and which bytes of which file hold it, wrapping included."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """What the index says of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def read_index(folder: Path, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """The stored tensors by key, those alone that `wanted` says yes to; nothing of their data is read.

    UserError: no distributed checkpoint, one of another backend, an index that is damaged or names what it must not.
    """
    _check_backend(folder)
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}; without it the checkpoint is incomplete"
        ) from error
    try:
        index = IndexUnpickler(io.BytesIO(content)).load()
        return _tensors(index, wanted)
    except pickle.UnpicklingError as error:
        raise UserError(f"{path} is refused: {error}") from error
    except Exception as error:  # a damaged pickle fails in any way
        raise UserError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    try:
        backend = json.loads(path.read_text(encoding="utf-8"))["sharded_backend"]
    except OSError as error:
        raise UserError(f"{folder} is no distributed checkpoint: it has no {BACKEND_FILE}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: it does not name a sharded_backend") from error
    if backend != "torch_dist":
        raise UserError(f"{path}: checkpoints of backend {backend!r} cannot be read, only 'torch_dist'")


def _tensors(index: Any, wanted: Callable[[str], bool]) -> dict[str, StoredTensor]:
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for key, place in index["storage_data"].items():
        if key.fields.get("offset") is not None:  # else an object, no tensor
            places[key["fqn"], key["offset"]] = place
    tensors = {}
    for name, stored in index["state_dict_metadata"].items():
        if "size" not in stored.fields or not wanted(name):
            continue
        chunks = []
        for chunk in stored["chunks"]:
            offsets, sizes = chunk["offsets"], chunk["sizes"]
            place = places[name, offsets]
            chunk = Chunk(offsets, sizes, place["relative_path"], int(place["offset"]), int(place["length"]))
            _check_chunk(name, stored["size"], chunk)
            chunks.append(chunk)
        dtype, *_ = stored["properties"].fields
        tensors[name] = StoredTensor(stored["size"], dtype, tuple(chunks))
    return tensors


def _check_chunk(name: str, shape: tuple[int, ...], chunk: Chunk) -> None:
    """ValueError: a box that does not lie in the tensor, or a file elsewhere."""
    for start, n, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True):
        if not 0 <= start < start + n <= whole:
            raise ValueError(f"chunk {chunk.offsets} + {chunk.sizes} of {name} does not lie in {shape}")
    if Path(chunk.file).name != chunk.file or chunk.start < 0 or chunk.length < 0:
        raise ValueError(f"{name} lies in {chunk.file!r} at {chunk.start}, expected a file of this folder")
