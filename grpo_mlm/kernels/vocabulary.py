"""This rank's part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """Ids `first .. first + columns - 1`; the rows of the matrix that follow are padding and enter no softmax."""

    first: int
    columns: int

    @staticmethod
    def of(weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> Shard:
        """`weight` `[V/tp, H]`: equally many rows on each rank of the group."""
        first = 0 if group is None else group.rank() * weight.shape[0]
        return Shard(first, max(0, min(weight.shape[0], vocab_size - first)))


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """RuntimeError where a target is outside of 0..vocab_size-1."""
    torch._assert_async(
        ((targets >= 0) & (targets < vocab_size)).all(), f"a target is outside the vocabulary of {vocab_size}"
    )
