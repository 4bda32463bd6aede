"""`python -m benchmarks.workspace VARIANT ROWS HIDDEN VOCAB`: memory that a variant of the loss needs, in bytes.

Peak resident memory of a second run above what inputs took before it, less the gradients that stay. In a process of
its own, since a process that has run another variant holds memory that would not count as new.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

import torch

from benchmarks.loss_problem import make_problem
from benchmarks.loss_variants import SKIPPING, variant

RUNS = 3


def workspace(name: str, rows: int, hidden: int, vocab: int) -> int | None:
    """Measured in a new process; None where the system does not tell peaks (no Linux)."""
    if not Path("/proc/self/clear_refs").exists():
        return None
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.workspace", name, str(rows), str(hidden), str(vocab)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},  # freed is given back
    )
    if done.returncode != 0:
        raise RuntimeError(f"workspace of {name!r}:\n{done.stderr}")
    return int(done.stdout)


def _measure(name: str, rows: int, hidden: int, vocab: int) -> int:
    torch.set_num_threads(1)
    problem, run = make_problem(rows, hidden, vocab, skipping=name == SKIPPING), variant(name)
    leaves = (problem.hidden, problem.weight)
    peaks = []
    for _ in range(1 + RUNS):  # the first one warms up
        for leaf in leaves:
            leaf.grad = None
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = _status("VmRSS")
        run(problem)
        peaks.append(_status("VmHWM") - before)
    return int(median(peaks[1:])) - sum(leaf.nbytes for leaf in leaves)


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    print(_measure(sys.argv[1], *map(int, sys.argv[2:])))
