"""Writes the files of a conversion with a few threads, each file aside and renamed, and noted when it is safe."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from grpo_mlm.bridge.durable import NewFile, sync
from grpo_mlm.convert.gather import Gather, Rows
from grpo_mlm.convert.journal import FileRecord, Journal
from grpo_mlm.convert.options import Progress
from grpo_mlm.convert.target import Target

BLOCKS_IN_FLIGHT = 5
"""Of each worker: one is written and two are hashed while the next is put together from a slice of about its size."""


class _Stopped(Exception):
    """The conversion ends early; the reason is another thread's."""


class FileWriter:
    """Writes the files that the journal does not have yet.

    While one block is hashed and written, the next is read: two threads a worker, `workers` files at a time.
    """

    def __init__(
        self, folder: Path, target: Target, gather: Gather, journal: Journal, progress: Progress, workers: int
    ) -> None:
        self._folder, self._target, self._gather = folder, target, gather
        self._journal, self._progress, self._workers = journal, progress, workers
        self._stop = threading.Event()

    def write_all(self) -> None:
        """On any end but a good one, Ctrl-C included, all threads have ended when this raises."""
        missing = [file for file in self._target.files() if file not in self._journal.done]
        with (
            ThreadPoolExecutor(self._workers, "read", _one_thread_each) as self._readers,
            ThreadPoolExecutor(self._workers, "write", _one_thread_each) as writers,
        ):
            try:
                futures = [writers.submit(self._write, file) for file in missing]
                wait(futures, return_when=FIRST_EXCEPTION)
                _raise_first(futures)
            except BaseException:
                self._stop.set()
                writers.shutdown(cancel_futures=True)
                raise

    def _write(self, file: str) -> None:
        aside, not_finite = self._folder / f"{file}.tmp", Counter[str]()

        def blocks(wanted: list[tuple[str, Rows]]) -> Iterator[Tensor]:
            return self._blocks(wanted, not_finite)

        with NewFile(aside, with_hash=True) as stream:
            items = self._target.write(file, stream, blocks)
        aside.rename(self._folder / file)
        sync(self._folder)
        self._journal.add(
            FileRecord(file, stream.nbytes, stream.sha256, items, dict(sorted(not_finite.items())))
        )

    def _blocks(self, wanted: list[tuple[str, Rows]], not_finite: Counter[str]) -> Iterator[Tensor]:
        """The blocks in order, each read while the one before is written."""
        jobs = iter(wanted)
        reads = deque(self._readers.submit(self._read, *job) for job in islice(jobs, 1))
        while reads:
            name, values, odd = reads.popleft().result()
            reads.extend(self._readers.submit(self._read, *job) for job in islice(jobs, 1))
            if self._stop.is_set():
                raise _Stopped
            if odd:
                not_finite[name] += odd
            yield values
            self._progress.advance(values.nbytes)
            del values  # or it would be alive while the next is waited for

    def _read(self, name: str, rows: Rows) -> tuple[str, Tensor, int]:
        """One block, and how many of its values are no finite numbers."""
        values = self._gather.block(name, rows)
        return name, values, count_not_finite(values)


def _one_thread_each() -> None:
    """The cores have work enough; torch would share every small operation out over all of them."""
    torch.set_num_threads(1)


def count_not_finite(values: Tensor) -> int:
    """How many elements are NaN or infinite."""
    if not values.numel():
        return 0
    extremes = torch.stack(torch.aminmax(values))  # one pass, no memory; a NaN anywhere is both extremes
    return 0 if extremes.isfinite().all() else int((~values.isfinite()).sum())


def _raise_first(futures: Sequence[Future[None]]) -> None:
    """The error that stopped the work, if any."""
    for future in futures:
        if future.done() and not future.cancelled():
            future.result()
