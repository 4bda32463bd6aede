"""From hidden states to loss and gradients: ours against logits under autograd and others, on one thread."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from benchmarks.loss_problem import MIB, Problem, make_problem
from benchmarks.loss_variants import SKIPPING, VARIANTS, liger_is_there, variant
from benchmarks.result import Result, summary
from benchmarks.workspace import workspace


def measure(rows: int, hidden: int, vocab: int, runs: int) -> Result:
    """One row a variant. Times are CPU seconds, taken in turns."""
    names = [name for name in (*VARIANTS, SKIPPING) if name != "Liger chunked" or liger_is_there()]
    seconds = _interleaved(names, rows, hidden, vocab, runs)
    spaces = {name: workspace(name, rows, hidden, vocab) for name in names}
    table = [_row(name, seconds, spaces) for name in names]
    return Result("fused_loss", table, _notes(rows, hidden, vocab, runs, names))


def _interleaved(names: list[str], rows: int, hidden: int, vocab: int, runs: int) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    every, some = make_problem(rows, hidden, vocab), make_problem(rows, hidden, vocab, skipping=True)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(1 + runs):  # the first one warms up, and compiles
        for name in names:
            took = _timed(name, some if name == SKIPPING else every)
            if turn:
                seconds[name].append(took)
    return seconds


def _timed(name: str, problem: Problem) -> float:
    problem.hidden.grad = problem.weight.grad = None
    run, began = variant(name), time.process_time()
    run(problem)
    return time.process_time() - began


def _row(name: str, seconds: dict[str, list[float]], spaces: dict[str, int | None]) -> dict[str, Any]:
    def times(other: str) -> float:
        """Of each turn the ratio, of those the median: turns share what disturbs them."""
        return median(a / b for a, b in zip(seconds[name], seconds[other], strict=True))

    mine, most = spaces[name], spaces["naive autograd"]
    return {
        "variant": name,
        **summary(seconds[name]),
        "x naive": times("naive autograd"),
        "x three products": times("three products"),
        "workspace MiB": None if mine is None else mine / MIB,
        "naive / workspace": None if not mine or most is None else most / mine,
    }


def _notes(rows: int, hidden: int, vocab: int, runs: int, names: list[str]) -> list[str]:
    notes = [
        f"T={rows}, H={hidden}, V={vocab}, fp32, one thread; forward and backward of the clipped loss with k3 KL; "
        f"CPU seconds, {runs} turns; ratios are medians over turns",
        "'ours, single pass' and recompute: a budget of 1/18 of naive's workspace; "
        f"'{SKIPPING}': without KL, rows masked or of advantage 0; naive takes as long on it",
        "workspace: peak resident memory above inputs and gradients, in a process of its own, median of 3 runs",
    ]
    if "Liger chunked" not in names:
        notes.append("Liger chunked: left out, liger_kernel is not installed")
    return notes
