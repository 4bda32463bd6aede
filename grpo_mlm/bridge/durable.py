"""Files and folders that are on the disk, whole, once they are seen."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

_SMALL = 1 << 16  # bytes for which a second thread costs more than it saves
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
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    @property
    def sha256(self) -> str:
        """Of what is written so far; `with_hash` only."""
        assert self._hash is not None
        return self._hash.hexdigest()

    def write(self, data: Any) -> int:
        """All of `data`, any bytes-like object."""
        view = memoryview(data).cast("B")
        hashed: Future[None] | None = None
        if self._hash is not None and len(view) < _SMALL:
            self._hash.update(view)
        elif self._hash is not None:  # while it is written: either takes about as long
            hashed = self._hasher.submit(self._hash.update, view)
        left = view
        while len(left):
            left = left[os.write(self._handle, left) :]
        if hashed is not None:
            hashed.result()
        self.nbytes += len(view)
        self._flush()
        return len(view)

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
