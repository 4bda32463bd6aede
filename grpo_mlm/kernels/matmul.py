"""Matrix products whose results are fp32, whatever the operands: fast, and never rounded to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

BLOCK_COLUMNS = 8192


def matmul_fp32(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, float32 `[M, N]`, summed in fp32; on the CPU also of batches `[..., M, K]`, `[..., K, N]`.

    The operands are taken as fp32 where both are, and otherwise rounded to bf16 (no rounding for a bf16 one).
    A logit of 12.34 in bf16 is off by 0.03, which would be 3% in a probability; that is why results stay fp32.
    """
    if a.dtype == b.dtype == torch.float32:
        return torch.matmul(a, b)
    if a.is_cuda:
        return torch.mm(a.to(torch.bfloat16), b.to(torch.bfloat16), out_dtype=torch.float32)
    with _cpu_bf16_products():
        return torch.matmul(a.float(), b.float())


def logits_fp32(
    hidden: Tensor, weight: Tensor, scale: float, out: Tensor | None = None, columns: int = BLOCK_COLUMNS
) -> Tensor:
    """`scale * hidden @ weight.T`, float32 `[R, C]`, in `out` where that is given."""
    out = torch.empty(len(hidden), len(weight), device=hidden.device) if out is None else out
    if hidden.dtype == weight.dtype == torch.float32:
        return torch.addmm(
            out, hidden, weight.T, beta=0, alpha=scale, out=out
        )  # no pass over `out` for the scale
    for a, b in _blocks(len(weight), columns):
        out[:, a:b] = matmul_fp32(hidden, weight[a:b].T)
    return out if scale == 1 else out.mul_(scale)


def add_inner(into: Tensor, tile: Tensor, weight: Tensor, columns: int = BLOCK_COLUMNS) -> None:
    """`into += tile @ weight`, float32 `[L, H]`, of tile `[L, C]` and weight `[C, H]`, where C is large."""
    if tile.dtype == weight.dtype == torch.float32:
        into.addmm_(tile, weight)
        return
    for a, b in _blocks(len(weight), columns):
        into.add_(matmul_fp32(tile[:, a:b], weight[a:b]))


def add_outer(into: Tensor, tile: Tensor, hidden: Tensor, columns: int = BLOCK_COLUMNS) -> None:
    """`into += tile.T @ hidden`, `[C, H]`, of tile `[L, C]` and hidden `[L, H]`, where C is large."""
    if into.dtype == tile.dtype == hidden.dtype == torch.float32:
        into.addmm_(tile.T, hidden)
        return
    for a, b in _blocks(len(into), columns):
        into[a:b].add_(matmul_fp32(tile[:, a:b].T, hidden))


def _blocks(total: int, step: int) -> Iterator[tuple[int, int]]:
    """Columns that are multiplied at a time where an operand is narrower than fp32: it may need an fp32 copy, and a
    product that is added to something is a tensor of its own first."""
    for start in range(0, total, step):
        yield start, min(start + step, total)


@contextmanager
def _cpu_bf16_products() -> Iterator[None]:
    """fp32 products by the CPU's bf16 units: operands are rounded to bf16, sums and results are fp32.

    The CPU has no `out_dtype`, and plain bf16 products round their result. On processors without such units oneDNN
    multiplies in fp32, with the same result for operands that came from bf16.
    """
    switch = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before
