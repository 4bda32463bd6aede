"""What of a conversion is done and on the disk, so that a killed one goes on where it was.

A file of JSON lines: first the job, then one line for each finished file, written when the file itself is safe.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from grpo_mlm.errors import UserError


@dataclass(frozen=True)
class FileRecord:
    """One finished file: its size and hash, what the target's index needs to know of it, and values that are no
    finite numbers, counted by tensor."""

    file: str
    bytes: int
    sha256: str
    items: list[dict[str, Any]] = field(default_factory=list)
    not_finite: dict[str, int] = field(default_factory=dict)


class Journal:
    """The open journal of the job `fingerprint`, whose files go to `folder`. It lies beside the folder.

    `done` are the files that are whole. With `restart` all earlier ones are deleted. A lock keeps a second process
    away. UserError: the folder holds another job's files, or another process works on it.
    """

    def __init__(self, folder: Path, fingerprint: str, restart: bool = False) -> None:
        self.folder, self.path = folder, folder.with_name(folder.name + ".journal")
        self.done: dict[str, FileRecord] = {}
        self._writing = threading.Lock()
        self._file = self.path.open("a+b")
        try:
            self._lock()
            if restart:
                self._delete()
            if not folder.exists():  # a journal without it is what a finished job left
                self._file.truncate(0)
            elif not folder.is_dir():
                raise UserError(f"{folder} is a file; the conversion needs this name for a folder, remove it")
            folder.mkdir(exist_ok=True)
            self._resume(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def _delete(self) -> None:
        """What an earlier conversion left."""
        if self.folder.is_dir() and any(self.folder.iterdir()):
            self._check_ours()
            shutil.rmtree(self.folder)
        self._file.truncate(0)

    def _check_ours(self) -> None:
        """UserError where no conversion is known to have written the files of the folder."""
        self._file.seek(0)
        try:
            first = json.loads(self._file.readline())
        except (ValueError, RecursionError):
            first = None
        if not _is_header(first):
            raise UserError(
                f"{self.folder} holds files that no conversion is known to have written, and they are not deleted; "
                "remove the folder yourself, or choose another output folder"
            )

    def _resume(self, fingerprint: str) -> None:
        if any(self.folder.iterdir()):
            self._check_ours()
        lines = self._lines()
        if len(lines) == 1 and _is_header(lines[0]):  # nothing is finished, so nothing is lost
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self._file.truncate(0)
            lines = []
        if lines and lines[0] != {"job": fingerprint}:
            raise UserError(
                f"{self.folder} holds files of another conversion (other source, options or version); "
                "pass --restart to delete them, or choose another output folder"
            )
        if not lines:
            self._append({"job": fingerprint})
        for record in self._records(lines[1:]):
            if _holds(self.folder / record.file, record):
                self.done[record.file] = record
        for path in self.folder.iterdir():  # half-written files, and whatever else is not known to be whole
            if path.name not in self.done:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _records(self, lines: list[Any]) -> list[FileRecord]:
        try:
            return [FileRecord(**line) for line in lines]
        except TypeError as error:
            raise UserError(f"{self.path} is damaged: {error}; pass --restart to begin again") from error

    def add(self, record: FileRecord) -> None:
        """Note a finished file, on the disk when this returns. Called from several threads."""
        with self._writing:
            self._append(asdict(record))
            self.done[record.file] = record

    def remove(self) -> None:
        """The job is finished."""
        self.path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{self.folder}: another process is converting into it; wait for it") from error

    def _lines(self) -> list[Any]:
        """Whole lines; what a kill left of the last one is cut off."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.path} is damaged: {error}; pass --restart to begin again") from error

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _is_header(line: Any) -> bool:
    return isinstance(line, dict) and line.keys() == {"job"} and isinstance(line["job"], str)


def _holds(path: Path, record: FileRecord) -> bool:
    """Whether the file is still what was written: also its hash, for the disk or somebody may have changed it."""
    if not path.is_file() or path.stat().st_size != record.bytes:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == record.sha256
