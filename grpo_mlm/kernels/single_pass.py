"""Rows, chunk by chunk: logits, softmax, the loss's gradient, and the products with it while the logits still exist."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.kernels.backends import RowOps
from grpo_mlm.kernels.blocked import RowGradients, compact_
from grpo_mlm.kernels.matmul import accumulate, inner_product, logits_fp32
from grpo_mlm.kernels.planner import Chunks
from grpo_mlm.kernels.row_stats import RowStats, join_ranks

Report = dict[str, Tensor]
LossFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Report]]
"""(log-probs [r], entropies [r], which rows int64 [r]) -> (loss of each row [r], what to report of each row [r]).

Element by element: a row's loss depends on that row alone. Differentiable by log-probs and entropies."""


class RowResults(NamedTuple):
    """What a pass finds out about each row, `[R]`, in order."""

    values: Tensor  # the rows' loss
    logprobs: Tensor
    entropy: Tensor
    report: Report

    @staticmethod
    def join(parts: list[RowResults]) -> RowResults:
        """Those of consecutive rows, at least one part."""
        values, logprobs, entropy, reports = zip(*parts, strict=True)
        report = {name: torch.cat([r[name] for r in reports]) for name in reports[0]}
        return RowResults(torch.cat(values), torch.cat(logprobs), torch.cat(entropy), report)


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
        gradients, results = self._loss(rows, stats)
        live = gradients.live
        if len(live):
            tile = compact_(logits, live)
            self.ops.gradients_(tile, targets[live], gradients.take(live))
            self._multiply(tile, rows, live)
        return results

    def _loss(self, rows: slice, stats: RowStats) -> tuple[RowGradients, RowResults]:
        """The rows' loss, and its gradient by log-prob and by entropy, None where that is not wanted or not there."""
        logprobs, entropy = stats.logprob, stats.entropy
        leaves = (logprobs, entropy) if self.entropy_grad else (logprobs,)
        with torch.enable_grad():
            for leaf in leaves:
                leaf.requires_grad_()
            index = torch.arange(rows.start, rows.stop, device=logprobs.device)
            values, report = self.loss_fn(logprobs, entropy, index)
            by_logprob, *by_entropy = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
        values, logprobs, entropy = values.detach(), logprobs.detach(), entropy.detach()
        by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob
        gradients = RowGradients(
            stats.log_normaliser, entropy, by_logprob, by_entropy[0] if by_entropy else None
        )
        return gradients, RowResults(values, logprobs, entropy, {k: v.detach() for k, v in report.items()})

    def _multiply(self, tile: Tensor, rows: slice, live: Tensor) -> None:
        """The gradient by scaled logits `[L, C]` is one by logits but for the scale, which goes to smaller tensors."""
        by_hidden = inner_product(tile, self.weight, self.chunks.columns)
        self.grad_hidden[rows].index_copy_(0, live, by_hidden.div_(self.temperature))
        if self.grad_weight is not None:
            accumulate(
                self.grad_weight, tile, self.hidden[rows][live], 1 / self.temperature, self.chunks.columns
            )
