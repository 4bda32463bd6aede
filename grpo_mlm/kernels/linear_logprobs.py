"""Log-probs and entropies straight from hidden states and the output matrix.

Logits exist one tile `[R, C]` at a time, C columns of this rank's vocabulary. The forward pass keeps four numbers a row
(`row_stats.py`); the backward pass makes each tile once more, turns it into the gradient of the logits, and
multiplies it away. Tiles span all rows because then each row of the weight's gradient is finished by one product: no
second, fp32 copy of a `[V, H]` gradient is needed, and one collective serves each pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_mlm.kernels.backends import Backend, row_ops
from grpo_mlm.kernels.blocked import RowGradients
from grpo_mlm.kernels.matmul import logits_fp32, matmul_fp32
from grpo_mlm.kernels.reference import reference_logprobs
from grpo_mlm.kernels.row_stats import empty_stats, join, join_ranks
from grpo_mlm.kernels.vocabulary import Shard, check_targets

# Wider tiles fall out of the cache: one over 49152 columns and 1000 rows takes twice as long.
CPU_COLUMNS = 1024
TILES_ALIVE = 3  # fp32 tiles of the same size that are alive at once


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
        shard, ops = Shard.of(weight, vocab_size, tp_group), row_ops(backend, hidden)
        targets = targets - shard.first
        tiles = list(_tiles(shard.columns, hidden, chunk_bytes))
        pieces = (ops.stats(logits_fp32(hidden, weight[a:b], 1 / temperature), targets - a) for a, b in tiles)
        stats = join_ranks(reduce(join, pieces, empty_stats(len(hidden), hidden.device)), tp_group)
        logprob, entropy = stats.logprob, stats.entropy
        ctx.save_for_backward(hidden, weight, targets, stats.log_normaliser, entropy)
        ctx.temperature, ctx.tiles, ctx.tp_group, ctx.ops = temperature, tiles, tp_group, ops
        ctx.set_materialize_grads(False)
        return logprob, entropy

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
        for a, b in ctx.tiles:
            tile = logits_fp32(hidden, weight[a:b], 1 / ctx.temperature)
            ctx.ops.gradients_(tile, targets - a, rows)
            grad_hidden += matmul_fp32(tile, weight[a:b])
            if grad_weight is not None:
                grad_weight[a:b] = matmul_fp32(tile.T, hidden)
        if ctx.tp_group is not None and ctx.tp_group.size() > 1:
            dist.all_reduce(grad_hidden, group=ctx.tp_group)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None, None, None


def _tiles(columns: int, hidden: Tensor, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    width = max(1, chunk_bytes // (4 * TILES_ALIVE * max(len(hidden), 1)))
    if not hidden.is_cuda:
        width = min(width, CPU_COLUMNS)
    for begin in range(0, columns, width):
        yield begin, min(begin + width, columns)
