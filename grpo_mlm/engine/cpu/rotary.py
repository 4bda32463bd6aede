"""The rotary embedding in the packed layout, few passes over memory each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotary_table(
    position_ids: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of each token's angles, `[T, 1, d]`; the two halves of d are alike. Angles are float32."""
    angles = torch.outer(position_ids.float(), inverse_frequencies).repeat(1, 2).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin with x = (x1, x2) halves of the last dimension, `[T, heads, d]`."""
    return _Rotate.apply(x, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=sign)
    return out


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, -1.0), None, None
