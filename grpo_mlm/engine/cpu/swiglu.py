"""SwiGLU that keeps only its input for the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import silu

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class SwiGLU(torch.nn.Module):
    """silu(gate) * up of `[..., gate | up]` (arXiv 2002.05202)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return _SwiGLU.apply(x)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        d_x = torch.empty_like(x)
        (gate, up), (d_gate, d_up) = x.chunk(2, -1), d_x.chunk(2, -1)
        torch.mul(silu(gate), grad, out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return d_x
