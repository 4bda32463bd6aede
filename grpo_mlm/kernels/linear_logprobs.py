"""Log-probs and entropies straight from hidden states and the output matrix, in tiles (`tiles.py`).

The forward pass keeps four numbers a row (`row_stats.py`), so any function of them can follow, also one that sees whole
samples. One collective serves each pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mlm.kernels.backends import Backend, row_ops
from grpo_mlm.kernels.planner import tile_columns
from grpo_mlm.kernels.reference import reference_logprobs
from grpo_mlm.kernels.row_loss import RowGradients
from grpo_mlm.kernels.row_stats import join_ranks
from grpo_mlm.kernels.tiles import Tiles
from grpo_mlm.kernels.vocabulary import Shard, check_targets


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    chunk_bytes: int,
    tp_group: dist.ProcessGroup | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target and entropy of each row, float32 `[R]`, of softmax(hidden weight^T / temperature).

    `hidden` `[R, H]`, the same on all ranks of `tp_group`; `weight` `[V/tp, H]`, this rank's rows of the
    output matrix, equally many on each rank; `targets` int64 `[R]`, ids of the whole vocabulary. Rows at and past
    `vocab_size` are padding: they enter no softmax and get no gradient. Tiles take at most `chunk_bytes`, or
    one column. Logits are fp32 also from bf16 operands; their gradients are multiplied in the operands' dtype.
    Differentiable through both outputs; the gradient of `hidden` is summed over `tp_group`, so every rank of it must
    run the backward pass. A target outside 0..vocab_size-1 raises RuntimeError.
    """
    check_targets(targets, vocab_size)
    if backend == "reference":
        return reference_logprobs(hidden, weight, targets, temperature, vocab_size, tp_group)
    return _LinearLogprobs.apply(
        hidden, weight, targets, temperature, vocab_size, chunk_bytes, tp_group, backend
    )


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        chunk_bytes: int,
        tp_group: dist.ProcessGroup | None,
        backend: Backend,
    ) -> tuple[Tensor, Tensor]:
        shard = Shard.of(weight, vocab_size, tp_group)
        targets = targets - shard.first
        width = tile_columns(len(hidden), chunk_bytes, hidden.device)
        tiles = Tiles(hidden, weight[: shard.columns], targets, temperature, row_ops(backend, hidden), width)
        stats = join_ranks(tiles.stats(), tp_group)
        entropy = stats.entropy
        ctx.save_for_backward(hidden, weight, targets, stats.log_normaliser, entropy)
        ctx.temperature, ctx.tp_group, ctx.columns = temperature, tp_group, shard.columns
        ctx.ops, ctx.width = tiles.ops, width
        ctx.set_materialize_grads(False)
        return stats.logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
        by_logprob = torch.zeros_like(entropy) if grad_logprob is None else grad_logprob / ctx.temperature
        by_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        rows = RowGradients(log_normaliser, entropy, by_logprob, by_entropy)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        tiles = Tiles(hidden, weight[: ctx.columns], targets, ctx.temperature, ctx.ops, ctx.width)
        tiles.gradients(rows, grad_hidden, None if grad_weight is None else grad_weight[: ctx.columns])
        if ctx.tp_group is not None and ctx.tp_group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.tp_group)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None
