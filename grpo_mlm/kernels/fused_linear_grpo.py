"""Hidden states and the output matrix to a loss and its gradients, in one pass over the logits.

A token-level loss reads of a row of logits only log-prob and entropy, which are known once the row's softmax is. So the
loss's gradient by them is known while the logits still exist: they become their own gradient in place, and the two
products of the backward pass follow at once. Three matrix products, where recomputing log-probs in the backward pass
takes four. Rows without gradient (advantage 0, clipped, rejected) leave before the last two. Where memory for logits is
too small for that, tiles are cheaper (`planner.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mlm.kernels.backends import Backend, row_ops
from grpo_mlm.kernels.planner import plan_chunks
from grpo_mlm.kernels.reference import reference_gradients
from grpo_mlm.kernels.row_loss import LossFn, Report, loss_of_rows
from grpo_mlm.kernels.row_stats import join_ranks
from grpo_mlm.kernels.single_pass import SinglePass
from grpo_mlm.kernels.tiles import Tiles
from grpo_mlm.kernels.vocabulary import Shard, check_targets

__all__ = ["FusedLoss", "LossFn", "fused_linear_grpo"]


class FusedLoss(NamedTuple):
    """`loss` is the sum over rows, differentiable; the others carry no gradient and hold every row."""

    loss: Tensor
    logprobs: Tensor  # float32 [R]
    entropy: Tensor  # float32 [R]
    report: Report  # each [R]


def fused_linear_grpo(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    temperature: float,
    vocab_size: int,
    chunk_bytes: int,
    tp_group: dist.ProcessGroup | None = None,
    backend: Backend = "auto",
    *,
    entropy_grad: bool,
    main_grad: Tensor | None = None,
    partial_hidden_grad: bool = False,
) -> FusedLoss:
    """Sum of `loss_fn` over the rows of softmax(hidden weight^T / temperature), with its gradients made on the way.

    `hidden`, `weight`, `targets`, `vocab_size`, `tp_group` are those of `linear_logprobs`, and so are the values.
    Logits and temporaries take at most `chunk_bytes` (`planner.py`). Without `entropy_grad`, entropies are constants
    to the loss. With `main_grad`, float32 `[V/tp, H]`, the weight's gradient is added there in this very call, none
    comes with `backward`, and the loss must reach `backward` unscaled. Both gradients are summed in fp32. That of the
    hidden states is summed over `tp_group` in `backward`, unless `partial_hidden_grad`:
    `sequence_parallel.gather_rows` sums it then. `reference` makes all logits at once, also in float64.
    """
    check_targets(targets, vocab_size)
    into = main_grad
    if into is None and weight.requires_grad:
        into = torch.zeros(weight.shape, dtype=_at_least_fp32(weight), device=weight.device)
    grad_hidden = torch.zeros(hidden.shape, dtype=_at_least_fp32(hidden), device=hidden.device)
    if backend == "reference":
        results = reference_gradients(
            hidden,
            weight,
            targets,
            loss_fn,
            temperature,
            vocab_size,
            tp_group,
            entropy_grad,
            grad_hidden,
            into,
        )
    else:
        shard, ops = Shard.of(weight, vocab_size, tp_group), row_ops(backend, hidden)
        # Padding counts: ranks with less of it must cut as the others do.
        plan = plan_chunks(
            len(hidden), hidden.shape[1], len(weight), weight.dtype, chunk_bytes, hidden.device
        )
        over = hidden.detach(), weight.detach()[: shard.columns], targets - shard.first
        by_weight = None if into is None else into[: shard.columns]
        if plan.mode == "columns":
            tiles = Tiles(*over, temperature, ops, plan.columns)
            stats = join_ranks(tiles.stats(), tp_group)
            gradients, results = loss_of_rows(stats, loss_fn, 0, temperature, entropy_grad)
            tiles.gradients(gradients, grad_hidden, by_weight)
        else:
            results = SinglePass(
                *over, loss_fn, temperature, tp_group, ops, plan, entropy_grad, grad_hidden, by_weight
            ).run()
    group = None if partial_hidden_grad else tp_group
    grad_weight = into if main_grad is None else None
    loss = _WithGradients.apply(hidden, weight, results.values.sum(), grad_hidden, grad_weight, group)
    return FusedLoss(loss, results.logprobs, results.entropy, results.report)


def _at_least_fp32(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _WithGradients(torch.autograd.Function):
    """The loss as a node of autograd whose gradients are there already. It hands them out once, and keeps none: what it
    kept, autograd would copy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        loss: Tensor,
        grad_hidden: Tensor,
        grad_weight: Tensor | None,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.gradients, ctx.group = [(grad_hidden, grad_weight)], group
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.gradients:
            raise RuntimeError(
                "backward ran through this loss already, and its gradients are handed out once"
            )
        grad_hidden, grad_weight = ctx.gradients.pop()
        if ctx.group is not None and ctx.group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.group)
        if grad_weight is not None:
            grad_weight = _scaled(grad_weight, scale).to(ctx.dtypes[1])
        elif ctx.needs_input_grad[1]:
            torch._assert_async(
                scale == 1, "the weight's gradient is in main_grad already, for an unscaled loss"
            )
        return _scaled(grad_hidden, scale).to(ctx.dtypes[0]), grad_weight, None, None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Most losses come with a scale of 1, and a pass over the gradient is dear; asking a GPU is too."""
    return gradient if not scale.is_cuda and scale.item() == 1 else gradient.mul_(scale)
