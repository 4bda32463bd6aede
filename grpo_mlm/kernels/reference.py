"""The plain way: all logits at once and torch's own log_softmax, in the operands' precision but at least fp32."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.kernels.row_loss import LossFn, RowResults
from grpo_mlm.kernels.vocabulary import Shard


def reference_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """What `linear_logprobs` gives, also in float64; with `[R, V]` tensors, several of them."""
    if tp_group is not None:
        hidden = _SumGradients.apply(hidden, tp_group)
    return _logprobs(hidden, weight, targets, temperature, vocab_size, tp_group)


def reference_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
    entropy_grad: bool,
    grad_hidden: Tensor,
    grad_weight: Tensor | None,
) -> RowResults:
    """What `SinglePass` does, by autograd through all logits."""
    with torch.enable_grad():
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        logprobs, entropy = _logprobs(*leaves, targets, temperature, vocab_size, tp_group)
        index = torch.arange(len(hidden), device=hidden.device)
        values, report = loss_fn(logprobs, entropy if entropy_grad else entropy.detach(), index)
        by_hidden, by_weight = torch.autograd.grad(values.sum(), leaves)
    grad_hidden.add_(by_hidden)
    if grad_weight is not None:
        grad_weight.add_(by_weight)
    columns = {name: column.detach() for name, column in report.items()}
    return RowResults(values.detach(), logprobs.detach(), entropy.detach(), columns)


def _logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    tp_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """Of which the gradient by `hidden` is this rank's part."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    columns = Shard.of(weight, vocab_size, None).columns if tp_group is None else len(weight)
    logits = hidden.to(dtype) @ weight[:columns].to(dtype).T / temperature
    if tp_group is not None:
        logits = _GatherColumns.apply(logits, tp_group)[:, :vocab_size]
    logp = torch.log_softmax(logits, dim=1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(dim=1)


class _GatherColumns(torch.autograd.Function):
    """All ranks' columns side by side. Every rank computes the same from them and keeps its part of the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.rank, ctx.columns = group.rank(), logits.shape[1]
        every = [torch.empty_like(logits) for _ in range(group.size())]
        dist.all_gather(every, logits.contiguous(), group=group)
        return torch.cat(every, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.rank * ctx.columns : (ctx.rank + 1) * ctx.columns], None


class _SumGradients(torch.autograd.Function):
    """The hidden states that all ranks share; each rank's columns give a part of their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
