"""Open files that threads share, read by position."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import torch
from torch import Tensor

from grpo_mlm.errors import UserError


class OpenFiles:
    """Handles by path, opened on first use and closed with this object."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._handles)

    def handle(self, path: Path) -> int:
        """UserError where it cannot be opened."""
        with self._lock:
            if path not in self._handles:
                try:
                    self._handles[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise UserError(f"{path} cannot be read: {error.strerror}") from error
            return self._handles[path]

    def read(self, path: Path, at: int, out: Tensor) -> None:
        """Bytes of a file from `at` on into all of `out`, contiguous. UserError where the file ends too soon."""
        left = memoryview(out.view(-1).view(torch.uint8).numpy().data)
        handle = self.handle(path)
        while len(left):
            try:
                n = os.preadv(handle, [left], at)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error
            if n == 0:
                raise UserError(f"{path} was cut short while it was read")
            left, at = left[n:], at + n


def _close_all(handles: dict[Path, int]) -> None:
    for handle in handles.values():
        os.close(handle)
