"""RMSNorm in few passes over memory; torch's own, on a CPU, is a chain of fp32 copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

BLOCK = 1 << 18  # elements that are fp32 at a time: small enough for a core's own cache


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), computed in fp32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> None:
        super().__init__()
        assert not config.sequence_parallel
        assert not config.layernorm_zero_centered_gamma
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale, w = torch.empty_like(x), torch.empty((len(x), 1)), weight.float()
        for rows in _blocks(x):
            block = x[rows].float()
            scale[rows] = block.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
            out[rows] = (block * scale[rows]).mul_(w)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale: d_x = scale * (g w - n mean(g w n)), d_weight = sum over rows of g n."""
        x, weight, scale = ctx.saved_tensors
        d_x, w = torch.empty_like(x), weight.float()
        d_weight = torch.zeros_like(w)
        for rows in _blocks(x):
            normal = x[rows].float() * scale[rows]
            g = grad[rows].float()
            g_normal = g * normal
            d_weight += g_normal.sum(0)
            mean = torch.mv(g_normal, w).div_(len(w)).unsqueeze(1)
            d_x[rows] = (g * w).addcmul_(normal, mean, value=-1).mul_(scale[rows])
        return d_x, d_weight.to(weight.dtype), None


def _blocks(x: Tensor) -> Iterator[slice]:
    rows = max(1, BLOCK // x.shape[1])
    for start in range(0, len(x), rows):
        yield slice(start, start + rows)
