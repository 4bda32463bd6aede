"""Sums and means over the tokens of each sample, handed back to its tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_sum(values: Tensor, sample: Tensor) -> Tensor:
    """At each token the sum over its sample's tokens, `[R]`, differentiable. `sample` int64 `[R]`: which sample a token
    belongs to; its tokens stand together."""
    _, place = torch.unique_consecutive(sample, return_inverse=True)
    sums = torch.zeros(len(values), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return sums[place]


def sample_mean(values: Tensor, sample: Tensor) -> Tensor:
    """At each token the mean over its sample's tokens, `[R]`, differentiable."""
    return sample_sum(values, sample) / sample_sum(torch.ones_like(values), sample)
