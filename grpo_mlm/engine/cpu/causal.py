"""Causal attention by batched products, in blocks whose scores stay small.

torch's flash kernel for CPUs takes six times as long for the backward pass of many short sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from grpo_mlm.kernels.matmul import matmul_fp32

QUERIES = 256  # query positions of a block
SCORES = 1 << 22  # scores that exist at a time


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(d)) v with position i seeing 0..i, `[N, R, L, d]`.

    query `[N, R, L, d]`: R heads share the key and value `[N, L, d]` of their group. Scores and probabilities are
    fp32, products are summed in fp32. The backward pass makes the probabilities anew.
    """
    return _CausalAttention.apply(query, key, value)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        out = torch.empty_like(query)
        for n, block, seen in _blocks(query.shape):
            p = _probabilities(query[n, :, block], key[n, seen], block.start)
            out[n, :, block] = matmul_fp32(p, value[n, seen]).view_as(out[n, :, block])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        d_query = torch.empty_like(query)
        d_key, d_value = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (key, value))
        for n, block, seen in _blocks(query.shape):
            q, k, v, g = query[n, :, block], key[n, seen], value[n, seen], grad[n, :, block].flatten(1, 2)
            p = _probabilities(q, k, block.start)
            d_value[n, seen] += matmul_fp32(p.mT, g)
            d_p = matmul_fp32(g, v.mT)
            d_s = torch.ops.aten._softmax_backward_data(d_p, p, -1, torch.float32).mul_(_scale(q))
            d_query[n, :, block] = matmul_fp32(d_s, k).view_as(q)
            d_key[n, seen] += matmul_fp32(d_s.mT, q.flatten(1, 2))
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype)


def _probabilities(query: Tensor, key: Tensor, first: int) -> Tensor:
    """query `[n, R, B, d]` at positions first.., key `[n, first + B, d]` -> float32 `[n, R * B, first + B]`."""
    n, heads, block, _ = query.shape
    scores = matmul_fp32(query.flatten(1, 2), key.mT).mul_(_scale(query)).view(n, heads, block, -1)
    scores[..., first:] += torch.full((block, block), -torch.inf, device=query.device).triu_(1)
    return scores.softmax(-1).view(n, heads * block, -1)


def _scale(query: Tensor) -> float:
    return query.shape[-1] ** -0.5


def _blocks(shape: torch.Size) -> Iterator[tuple[slice, slice, slice]]:
    """(groups, query positions, key positions that these see) of each block."""
    groups, heads, length, _ = shape
    rows = min(length, QUERIES)
    each = max(1, SCORES // (heads * rows * length))
    for n in range(0, groups, each):
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            yield slice(n, min(n + each, groups)), slice(start, stop), slice(0, stop)
