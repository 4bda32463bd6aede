"""Hidden states that are cut along the sequence: only the rows that are scored travel."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def gather_rows(hidden: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Rows `[R, H]` of hidden states of which each rank of `group` holds an equal part `[T/tp, H]`, in rank order.

    `rows` int64 `[R]`, ascending, numbers of the whole sequence, the same on every rank. The backward pass sums the
    ranks' gradients and gives each its rows: each rank's share of the vocabulary makes a part of them, so the function
    that follows must leave its gradient partial.
    """
    return _GatherRows.apply(hidden, rows, group)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        length = len(hidden)
        ctx.group, ctx.length, ctx.dtype = group, length, hidden.dtype
        ctx.mine = rows[rows // length == group.rank()] % length
        ctx.counts = torch.bincount(rows // length, minlength=group.size()).tolist()
        padded = pad(hidden[ctx.mine], (0, 0, 0, max(ctx.counts) - len(ctx.mine)))
        every = [torch.empty_like(padded) for _ in ctx.counts]
        dist.all_gather(every, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(every, ctx.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Summed in fp32: parts of one gradient, each of which may be much larger than their sum."""
        gradient = grads[0].float()
        most = max(ctx.counts)
        parts = [pad(part, (0, 0, 0, most - len(part))) for part in gradient.split(ctx.counts)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        out = gradient.new_zeros(ctx.length, gradient.shape[1])
        out[ctx.mine] = mine[: len(ctx.mine)]
        return out.to(ctx.dtype), None, None
