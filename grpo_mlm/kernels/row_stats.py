"""What a piece of the vocabulary says about each row's softmax, and how pieces are joined.

A piece is a block of columns on one rank or all columns of one rank: both join by the same rule, so log-probs
and entropies are the same numbers on every rank, bit for bit, when all join the same pieces in the same order.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RowStats(NamedTuple):
    """Of logits z over a piece of the vocabulary; each float32 `[R]`."""

    peak: Tensor  # max z
    mass: Tensor  # sum exp(z - peak)
    moment: Tensor  # sum (z - peak) exp(z - peak)
    target: Tensor  # z of the target token where it is in the piece, else 0

    @property
    def log_normaliser(self) -> Tensor:
        """log sum exp z."""
        return self.peak + self.mass.log()

    @property
    def logprob(self) -> Tensor:
        """z_target - log sum exp z."""
        return (self.target - self.peak) - self.mass.log()

    @property
    def entropy(self) -> Tensor:
        """-sum p log p; the peak cancels, so that large logits cost no digits."""
        return self.mass.log() - self.moment / self.mass


def empty_stats(rows: int, device: torch.device) -> RowStats:
    """Of a piece without columns: joins as neutral. The peak is finite because -inf times a mass of 0 is NaN."""
    zero = torch.zeros(rows, device=device)
    return RowStats(torch.full_like(zero, torch.finfo(torch.float32).min), zero, zero, zero)


def block_stats(logits: Tensor, targets: Tensor) -> RowStats:
    """Of a block of logits `[R, C]`, which stays; `targets` `[R]` are columns of it, or outside 0..C-1."""
    peak = logits.amax(dim=1)
    return RowStats(peak, *mass_and_moment(logits, peak), target_logits(logits, targets))


def mass_and_moment(logits: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
    """sum exp(z - peak) and sum (z - peak) exp(z - peak) over the columns of logits `[R, C]`, each `[R]`."""
    shifted = logits - peak[:, None]
    weight = shifted.exp()
    mass = weight.sum(dim=1)
    return mass, weight.mul_(shifted).sum(dim=1)


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The logit of each row's target `[R]`, 0 where that is outside 0..C-1."""
    mine, column = owned(targets, logits.shape[1])
    return torch.where(mine, logits.gather(1, column[:, None])[:, 0], 0.0)


def owned(targets: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Which targets `[R]` are columns of this piece, and a column that is always safe to index."""
    return (targets >= 0) & (targets < columns), targets.clamp(0, columns - 1)


def join(a: RowStats, b: RowStats) -> RowStats:
    """Stats of two pieces put side by side."""
    peak = torch.maximum(a.peak, b.peak)
    down_a, down_b = a.peak - peak, b.peak - peak
    scale_a, scale_b = down_a.exp(), down_b.exp()
    return RowStats(
        peak,
        scale_a * a.mass + scale_b * b.mass,
        scale_a * (a.moment + down_a * a.mass) + scale_b * (b.moment + down_b * b.mass),
        a.target + b.target,
    )


def join_ranks(stats: RowStats, group: dist.ProcessGroup | None) -> RowStats:
    """Stats over the whole vocabulary, from every rank's piece in rank order: one all-gather of `[4, R]`."""
    if group is None or group.size() == 1:
        return stats
    mine = torch.stack(list(stats))
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return reduce(join, (RowStats(*piece.unbind()) for piece in every))
