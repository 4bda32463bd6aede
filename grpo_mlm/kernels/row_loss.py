"""From the softmax of some rows to their loss, and to its gradient by log-prob and entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_mlm.kernels.row_stats import RowStats

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


class RowGradients(NamedTuple):
    """Of a loss, by the log-prob and the entropy of each row, with what a row's softmax needs; each float32 `[R]`.

    Divided by the temperature: what the row operations make of them is the gradient by logits before it."""

    log_normaliser: Tensor
    entropy: Tensor
    grad_logprob: Tensor
    grad_entropy: Tensor | None

    def take(self, rows: Tensor) -> RowGradients:
        """Of some rows."""
        return RowGradients(*(None if column is None else column[rows] for column in self))  # type: ignore[arg-type]

    @property
    def live(self) -> Tensor:
        """The rows of which one gradient is not 0, int64 `[L]`, ascending."""
        alive = self.grad_logprob != 0
        if self.grad_entropy is not None:
            alive |= self.grad_entropy != 0
        return alive.nonzero()[:, 0]


def loss_of_rows(
    stats: RowStats, loss_fn: LossFn, first: int, temperature: float, entropy_grad: bool
) -> tuple[RowGradients, RowResults]:
    """Of rows `first`, `first + 1`, ... Without `entropy_grad` their entropies are constants."""
    logprobs, entropy = stats.logprob.detach(), stats.entropy.detach()
    leaves = (logprobs, entropy) if entropy_grad else (logprobs,)
    with torch.enable_grad():
        for leaf in leaves:
            leaf.requires_grad_()
        index = torch.arange(first, first + len(logprobs), device=logprobs.device)
        values, report = loss_fn(logprobs, entropy, index)
        found = torch.autograd.grad(values.sum(), leaves, allow_unused=True)
    by_logprob, by_entropy = (None if g is None else g / temperature for g in (*found, None)[:2])
    values, logprobs, entropy = values.detach(), logprobs.detach(), entropy.detach()
    by_logprob = torch.zeros_like(logprobs) if by_logprob is None else by_logprob
    results = RowResults(
        values, logprobs, entropy, {name: column.detach() for name, column in report.items()}
    )
    return RowGradients(stats.log_normaliser, entropy, by_logprob, by_entropy), results
