"""Matrix products whose results are fp32, whatever the operands: fast, and never rounded to bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
