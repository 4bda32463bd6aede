"""Logits of all rows, some columns at a time: made once for the statistics and once more for the gradients.

Each row of the weight's gradient is finished by one product and each row of the weight is read once a pass, however few
logits exist at a time; the price is a fourth product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from grpo_mlm.kernels.backends import RowOps
from grpo_mlm.kernels.matmul import add_inner, add_outer, logits_fp32
from grpo_mlm.kernels.row_loss import RowGradients
from grpo_mlm.kernels.row_stats import RowStats, empty_stats, join


@dataclass(frozen=True)
class Tiles:
    """Over rows of softmax(hidden weight^T / temperature)."""

    hidden: Tensor  # [R, H]
    weight: Tensor  # [C, H], this rank's columns without padding
    targets: Tensor  # int64 [R], columns of it, or outside
    temperature: float
    ops: RowOps
    width: int  # columns of a tile

    @torch.no_grad()
    def stats(self) -> RowStats:
        """Of this rank's columns."""
        pieces = (self.ops.stats(self._logits(self.hidden, a, b), self.targets - a) for a, b in self._cuts())
        return reduce(join, pieces, empty_stats(len(self.hidden), self.hidden.device))

    @torch.no_grad()
    def gradients(self, rows: RowGradients, grad_hidden: Tensor, grad_weight: Tensor | None) -> None:
        """Added to `grad_hidden`, float32 `[R, H]`, of which this is the rank's part, and to `grad_weight` `[C, H]`.
        Rows without gradient are left out."""
        live, hidden, targets, by_hidden = rows.live, self.hidden, self.targets, grad_hidden
        some = len(live) < len(hidden)
        if some:
            hidden, targets, rows = hidden[live], targets[live], rows.take(live)
            by_hidden = torch.zeros(len(live), hidden.shape[1], device=hidden.device)
        for a, b in self._cuts() if len(live) else ():
            tile = self._logits(hidden, a, b)
            self.ops.gradients_(tile, targets - a, rows)
            add_inner(by_hidden, tile, self.weight[a:b])
            if grad_weight is not None:
                add_outer(grad_weight[a:b], tile, hidden)
        if some:
            grad_hidden.index_add_(0, live, by_hidden)

    def _logits(self, hidden: Tensor, a: int, b: int) -> Tensor:
        return logits_fp32(hidden, self.weight[a:b], 1 / self.temperature)

    def _cuts(self) -> Iterator[tuple[int, int]]:
        for begin in range(0, len(self.weight), self.width):
            yield begin, min(begin + self.width, len(self.weight))
