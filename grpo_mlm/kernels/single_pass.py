"""Rows, chunk by chunk: logits, softmax, the loss's gradient, and the products with it while the logits still exist."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.kernels.backends import RowOps
from grpo_mlm.kernels.blocked import compact_
from grpo_mlm.kernels.matmul import add_inner, add_outer, logits_fp32
from grpo_mlm.kernels.planner import Chunks
from grpo_mlm.kernels.row_loss import LossFn, RowResults, loss_of_rows
from grpo_mlm.kernels.row_stats import join_ranks


@dataclass(frozen=True)
class SinglePass:
    """Over rows of softmax(hidden weight^T / temperature). The gradients are added to `grad_hidden` and `grad_weight`;
    the former is this rank's part of a sum over `group`."""

    hidden: Tensor  # [R, H]
    weight: Tensor  # [C, H], this rank's columns without padding
    targets: Tensor  # int64 [R], columns of it, or outside
    loss_fn: LossFn
    temperature: float
    group: dist.ProcessGroup | None
    ops: RowOps
    chunks: Chunks
    entropy_grad: bool
    grad_hidden: Tensor  # float32 [R, H]
    grad_weight: Tensor | None  # float32 [C, H]

    @torch.no_grad()
    def run(self) -> RowResults:
        """One buffer of logits serves all chunks."""
        cuts = self.chunks.cut(len(self.hidden))
        buffer = torch.empty(max(b - a for a, b in cuts), len(self.weight), device=self.hidden.device)
        return RowResults.join([self._chunk(slice(a, b), buffer[: b - a]) for a, b in cuts])

    def _chunk(self, rows: slice, logits: Tensor) -> RowResults:
        """Logits `[r, C]` are made in `logits` and become their own gradient there. Rows without gradient leave
        in between; the products see no trace of them."""
        hidden, targets = self.hidden[rows], self.targets[rows]
        logits_fp32(hidden, self.weight, 1 / self.temperature, logits, self.chunks.columns)
        stats = join_ranks(self.ops.stats(logits, targets), self.group)
        gradients, results = loss_of_rows(
            stats, self.loss_fn, rows.start, self.temperature, self.entropy_grad
        )
        live = gradients.live
        if len(live):
            tile = compact_(logits, live)
            self.ops.gradients_(tile, targets[live], gradients.take(live))
            self._multiply(tile, rows, live)
        return results

    def _multiply(self, tile: Tensor, rows: slice, live: Tensor) -> None:
        by_hidden = torch.zeros(len(live), self.hidden.shape[1], device=tile.device)
        add_inner(by_hidden, tile, self.weight, self.chunks.columns)
        self.grad_hidden[rows].index_copy_(0, live, by_hidden)
        if self.grad_weight is not None:
            add_outer(self.grad_weight, tile, self.hidden[rows][live], self.chunks.columns)
