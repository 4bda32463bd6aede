"""Row operations in plain torch, some columns at a time: temporaries stay inside a core's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_mlm.kernels.grad_logits import grad_logits_
from grpo_mlm.kernels.row_loss import RowGradients
from grpo_mlm.kernels.row_stats import RowStats, empty_stats, mass_and_moment, target_logits

BLOCK_ELEMENTS = 1 << 19
"""Elements of a block; two blocks of 2 MiB are alive at a time."""


def stats(logits: Tensor, targets: Tensor) -> RowStats:
    """Of all columns of logits `[R, C]`, which stay. Peaks first, in one go: blocks need no joining then."""
    if logits.shape[1] == 0:
        return empty_stats(len(logits), logits.device)
    peak = logits.amax(dim=1)
    mass, moment = torch.zeros_like(peak), torch.zeros_like(peak)
    for a, b in _blocks(logits):
        of_block = mass_and_moment(logits[:, a:b], peak)
        mass += of_block[0]
        moment += of_block[1]
    return RowStats(peak, mass, moment, target_logits(logits, targets))


def gradients_(logits: Tensor, targets: Tensor, rows: RowGradients) -> None:
    """Logits `[R, C]` become the gradient by them, all columns."""
    for a, b in _blocks(logits):
        grad_logits_(logits[:, a:b], targets - a, *rows)


def compact_(logits: Tensor, live: Tensor) -> Tensor:
    """The rows `live` `[L]`, ascending, moved to the top of logits `[R, C]`; returns `[L, C]` of the same storage."""
    if len(live) < len(logits):
        for a, b in _blocks(logits):
            logits[: len(live), a:b] = logits[:, a:b].index_select(0, live)
    return logits[: len(live)]


def _blocks(logits: Tensor) -> Iterator[tuple[int, int]]:
    rows, columns = logits.shape
    width = max(256, BLOCK_ELEMENTS // max(rows, 1))
    for begin in range(0, columns, width):
        yield begin, min(begin + width, columns)
