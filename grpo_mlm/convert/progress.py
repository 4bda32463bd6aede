"""How far a conversion is: a bar on a terminal, else a line now and then. Results go elsewhere, to standard output."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from grpo_mlm.convert.text import printable, show_size

if TYPE_CHECKING:  # help needs no torch
    from grpo_mlm.convert import options

LINE_EVERY_S = 10.0


@contextmanager
def watched(verb: str, quiet: bool) -> Iterator[options.Progress]:
    """What to hand to a conversion; `verb` says what is done with the bytes. Draws on standard error."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    if quiet:
        from grpo_mlm.convert.options import Silent

        yield Silent()
    elif console.is_terminal:
        with Bar(verb, console) as bar:
            yield bar
    else:
        yield Lines(verb, console)


class Bar:
    """Bytes, rate and time left, redrawn in place; lines go above it."""

    def __init__(self, verb: str, console: Console) -> None:
        self._verb = verb
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self._task: TaskID | None = None

    def start(self, total: int, done: int) -> None:
        """Of `total` bytes, an earlier run has left `done`."""
        self._task = self._bar.add_task(self._verb, total=total, completed=done)

    def advance(self, n: int) -> None:
        """`n` more bytes are done."""
        if self._task is not None:
            self._bar.advance(self._task, n)

    def say(self, text: str) -> None:
        """A line for the user."""
        self._bar.console.print(printable(text))

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class Lines:
    """A line at the start, one every ten seconds, and one when all bytes are done."""

    def __init__(self, verb: str, console: Console) -> None:
        self._verb, self._console = verb, console
        self._lock = threading.Lock()
        self._total = self._done = self._at_start = 0
        self._started = self._last = time.monotonic()

    def start(self, total: int, done: int) -> None:
        """Of `total` bytes, an earlier run has left `done`."""
        self._total, self._done, self._at_start = total, done, done
        self._started = self._last = time.monotonic()
        earlier = f", {show_size(done)} of them done by an earlier run" if done else ""
        self.say(f"{self._verb} {show_size(total)}{earlier}")

    def advance(self, n: int) -> None:
        """`n` more bytes are done."""
        with self._lock:
            self._done += n
            now = time.monotonic()
            if self._done < self._total and now - self._last < LINE_EVERY_S:
                return
            self._last = now
            rate = (self._done - self._at_start) / max(now - self._started, 1e-3)
            line = (
                f"{self._verb} {show_size(self._done)} of {show_size(self._total)} "
                f"({100 * self._done // max(self._total, 1)}%), {show_size(round(rate))}/s"
            )
        self.say(line)

    def say(self, text: str) -> None:
        """A line for the user."""
        self._console.print(printable(text))
