"""What the loss costs on GPUs, by arithmetic: bf16 products at peak, memory traffic at full bandwidth, one after the
other; a product reads its operands while it computes. No overlap and no launch gaps: `bound` cannot be beaten.

E = T V / tp logits, P = 2 T H V / tp FLOPs of one product. Traffic, in bytes a logit:

- autograd on materialised logits: bf16 logits and some seven fp32 passes each way, 36 forward and 34 backward;
- recompute (log-probs as a function of their own): 4 products; the gradient tile is written and read twice in bf16;
- single pass: 3 products; fp32 logits written, read by the statistics, read by the gradient, which is written in
  bf16 and read twice. Each chunk but the first reads and writes the fp32 gradient of the matrix once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.result import Result
from grpo_mlm.kernels.planner import plan_chunks

ROWS, VOCAB = 8192, 151936
HIDDEN, PARALLEL = (4096, 5120, 8192), (1, 8)
MIB, GIB = 1 << 20, 1 << 30
BUDGET = 1280 * MIB
NAIVE_BYTES, RECOMPUTE_BYTES, SINGLE_BYTES = 36 + 34, 2 + 2 + 2, 4 + 4 + 4 + 2 + 2 + 2


@dataclass(frozen=True)
class Gpu:
    name: str
    flops: float  # dense bf16, a second
    bandwidth: float  # bytes a second


# The vendor's data sheets of the SXM boards.
GPUS = (Gpu("H100", 989.5e12, 3.35e12), Gpu("H200", 989.5e12, 4.8e12))


def roofline() -> Result:
    """Milliseconds of forward and backward, for each size, and the part of the bound that the design can reach."""
    rows = [_row(h, tp, gpu) for h in HIDDEN for tp in PARALLEL for gpu in GPUS]
    notes = [
        f"T={ROWS}, V={VOCAB}, bf16 operands, fp32 logits, a budget of {BUDGET // MIB} MiB; arithmetic, not measured",
        "bound: three products at peak, or inputs and gradients once at full bandwidth, whichever takes longer",
        "reach: bound / single pass",
    ]
    return Result("fused_loss_roofline", rows, notes)


def _row(hidden: int, tp: int, gpu: Gpu) -> dict[str, Any]:
    columns = VOCAB // tp
    logits, product = ROWS * columns, 2 * ROWS * hidden * columns
    plan = plan_chunks(ROWS, hidden, columns, torch.bfloat16, BUDGET, torch.device("cuda"))
    chunks = len(plan.cut(ROWS))
    once_more = (chunks - 1) * 2 * 4 * hidden * columns

    def milliseconds(products: int, moved: int) -> float:
        return 1e3 * (products * product / gpu.flops + moved / gpu.bandwidth)

    # bf16 inputs and hidden gradient, fp32 gradient of the matrix
    least = (2 + 4) * hidden * columns + (2 + 2) * ROWS * hidden
    bound = max(milliseconds(3, 0), milliseconds(0, least))
    single = milliseconds(3, SINGLE_BYTES * logits + once_more)
    return {
        "GPU": gpu.name,
        "H": hidden,
        "TP": tp,
        "TFLOP": 3 * product / 1e12,
        "GB moved": (SINGLE_BYTES * logits + once_more) / 1e9,
        "bound ms": bound,
        "single pass ms": single,
        "reach": bound / single,
        "recompute ms": milliseconds(4, RECOMPUTE_BYTES * logits),
        "naive ms": milliseconds(3, NAIVE_BYTES * logits),
        "chunks": chunks,
        "logits GiB": 4 * max(b - a for a, b in plan.cut(ROWS)) * columns / GIB,
        "naive GiB": 14 * logits / GIB,
    }
