"""Conversion both ways against a plain copy of the same bytes, all onto the disk (fsync), page cache warm.

Each conversion runs in a process of its own, which measures itself: seconds without the start of Python, and the most
memory that it ever had, Python and torch included.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.models import find_model
from benchmarks.random_model import make_folder
from benchmarks.result import Result, summary
from grpo_mlm.bridge.durable import sync
from grpo_mlm.convert.job import export_checkpoint, import_checkpoint
from grpo_mlm.convert.options import Options, Silent

Work = Callable[[Path, Path, int], None]


def measure(model: str, runs: int, workers: int, folder: str | None) -> Result:
    """One row a way of getting the weights from one folder to another."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        hf, dist = Path(made) / "hf", Path(made) / "dist"
        size = make_folder(find_model(model), hf)
        _run(import_hf, hf, dist, workers)
        ways: dict[str, tuple[Work, Path]] = {
            "plain copy": (copy, hf),
            "import, HF -> torch_dist": (import_hf, hf),
            "export, torch_dist -> HF": (export_hf, dist),
        }
        found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(runs):
            for name, (work, source) in ways.items():
                found[name].append(_run(work, source, Path(made) / "out", workers))
                shutil.rmtree(Path(made) / "out")
    rows: list[dict[str, Any]] = []
    for name, measured in found.items():
        row = {"way": name, **summary([seconds for seconds, _ in measured])}
        row["time / copy"] = row["median s"] / (rows[0]["median s"] if rows else row["median s"])
        rows.append(row | {"peak GB": max(peak for _, peak in measured) / 1e9})
    notes = [
        f"{model}, {size / 1e9:.2f} GB, {workers} workers, {runs} runs of each in turns",
        "no row of mbridge: it builds the model, of Transformer Engine's layers, on a GPU",
    ]
    return Result("convert", rows, notes)


def copy(source: Path, out: Path, workers: int) -> None:
    """What the disk can do."""
    out.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, out / path.name)
        sync(out / path.name)


def import_hf(source: Path, out: Path, workers: int) -> None:
    import_checkpoint(source, out, Options(workers=workers), Silent())


def export_hf(source: Path, out: Path, workers: int) -> None:
    export_checkpoint(source, out, Options(workers=workers), Silent())


def _run(work: Work, source: Path, out: Path, workers: int) -> tuple[float, int]:
    """(seconds, bytes of memory at most) of the work in a process of its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_timed, args=(there, work, source, out, workers))
    process.start()
    there.close()
    try:
        seconds, peak = here.recv()
    finally:
        process.join()
    return seconds, peak


def _timed(pipe: Any, work: Work, source: Path, out: Path, workers: int) -> None:
    import torch.distributed.checkpoint  # noqa: F401  # else imported by the first who needs it, inside the clock

    os.sync()  # what earlier runs left to be written is not this one's work
    began = time.perf_counter()
    work(source, out, workers)
    seconds = time.perf_counter() - began
    pipe.send((seconds, peak_memory()))


def peak_memory() -> int:
    """Bytes that this process had at most. Not `getrusage`: that counts the parent's memory before exec too."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
