"""Which implementation of the row operations serves a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_mlm.kernels import blocked
from grpo_mlm.kernels.row_loss import RowGradients
from grpo_mlm.kernels.row_stats import RowStats

Backend = Literal["auto", "reference", "chunked"]


@dataclass(frozen=True)
class RowOps:
    """What happens to logits between the products with the output matrix."""

    stats: Callable[[Tensor, Tensor], RowStats]
    """(logits [R, C], targets [R]) -> stats of each row; the logits stay."""
    gradients_: Callable[[Tensor, Tensor, RowGradients], None]
    """(logits [R, C], targets [R], gradients by the rows' values): the logits become the gradient by them."""


def row_ops(backend: Backend, hidden: Tensor) -> RowOps:
    """`auto` is chunked. ValueError for other dtypes than it computes with."""
    if hidden.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"hidden states are {hidden.dtype}, expected float32 or bfloat16; reference takes others"
        )
    return RowOps(blocked.stats, blocked.gradients_)
