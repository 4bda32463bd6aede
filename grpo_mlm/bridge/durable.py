"""Files and folders that are on the disk, whole, once they are seen."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

HASHED_LATER = 4  # writes that the hash may be behind: an item of a checkpoint is three
_FLUSH_BYTES = 32 << 20
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def sync(path: Path) -> None:
    """Onto the disk, so that a rename that follows never uncovers half-written files."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(aside: Path, out: Path) -> None:
    """Rename a finished folder and see to it that the rename lasts; its files are on the disk already."""
    sync(aside)
    aside.rename(out)
    sync(out.parent)


def side_files(folder: Path) -> list[Path]:
    """What a model folder holds beside its weights: config, tokenizer, chat template, licence."""
    return [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.endswith(_WEIGHT_FILES)]


def copy_files(files: list[Path], folder: Path, skip: Callable[[str], bool] = lambda _: False) -> None:
    """Byte for byte, onto the disk."""
    for path in files:
        if not skip(path.name):
            shutil.copyfile(path, folder / path.name)
            sync(folder / path.name)


class NewFile(io.RawIOBase):
    """A file that is written front to back, hashed on the way if asked, and on the disk when its `with` ends well."""

    def __init__(self, path: Path, with_hash: bool = False) -> None:
        self.path, self.nbytes = path, 0
        self._flushed = 0
        self._hash = hashlib.sha256() if with_hash else None
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[Future[None]] = deque()
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    @property
    def sha256(self) -> str:
        """Of what is written so far; `with_hash` only."""
        assert self._hash is not None
        self._wait_for_hash(0)
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """All of `data`, any bytes-like object. Where it is hashed it must stay as it is: the hash comes later."""
        view = memoryview(data).cast("B")
        if self._hash is not None:
            self._hashing.append(self._hasher.submit(self._hash.update, view))
        left = view
        while len(left):
            left = left[os.write(self._handle, left) :]
        self._wait_for_hash(HASHED_LATER)
        self.nbytes += len(view)
        self._flush()
        return len(view)

    def _wait_for_hash(self, behind: int) -> None:
        """Until no more than so many writes are still to be hashed."""
        while len(self._hashing) > behind:
            self._hashing.popleft().result()

    def tell(self) -> int:
        return self.nbytes

    def writable(self) -> bool:
        return True

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._handle)
        finally:
            self.close()

    def close(self) -> None:
        if not self.closed:
            self._hasher.shutdown()
            os.close(self._handle)
        super().close()

    def _flush(self) -> None:
        """Let the disk begin with what is written, or all of it would wait for the end."""
        if self.nbytes - self._flushed >= _FLUSH_BYTES:
            os.posix_fadvise(self._handle, self._flushed, self.nbytes - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self.nbytes
