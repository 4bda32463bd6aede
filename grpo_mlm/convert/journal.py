"""What of a conversion is done and on the disk, so that a killed one goes on where it was.

A file of JSON lines: first the job, then one line for each finished file, written when the file itself is safe.
"""

from __future__ import annotations

import fcntl
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
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():  # a journal without it is what a finished job left
                self._file.truncate(0)
            folder.mkdir(exist_ok=True)
            self._resume(fingerprint)
        except BaseException:
            self._file.close()
            raise

    def _resume(self, fingerprint: str) -> None:
        lines = self._lines()
        if len(lines) == 1:  # nothing is finished, so nothing is lost
            shutil.rmtree(self.folder)
            self.folder.mkdir()
            self._file.truncate(0)
            lines = []
        if lines[:1] != [{"job": fingerprint}] and (lines or any(self.folder.iterdir())):
            raise UserError(
                f"{self.folder} holds files of another conversion (other source, options or version); "
                "pass --restart to delete them, or choose another output folder"
            )
        if not lines:
            self._append({"job": fingerprint})
        for record in (FileRecord(**line) for line in lines[1:]):
            path = self.folder / record.file
            if path.is_file() and path.stat().st_size == record.bytes:
                self.done[record.file] = record

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
        except ValueError as error:
            raise UserError(f"{self.path} is damaged: {error}; pass --restart to begin again") from error

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
