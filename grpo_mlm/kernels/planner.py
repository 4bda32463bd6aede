"""How much of the logits exists at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_mlm.kernels.blocked import BLOCK_ELEMENTS

_BLOCK_BYTES = 3 * 4 * BLOCK_ELEMENTS  # temporaries of the row operations in plain torch
_FEWEST_COLUMNS = 256  # narrower products are slow


@dataclass(frozen=True)
class Chunks:
    """`whole`: all rows of logits at once; `rows`: that many at a time. Products of bf16 operands take `columns` at a
    time, because they need fp32 copies beside the logits."""

    mode: Literal["whole", "rows"]
    rows: int
    columns: int

    def cut(self, rows: int) -> list[tuple[int, int]]:
        """Begin and end of each chunk, equally large but for one row; one empty chunk where there is no row."""
        count = max(1, -(-rows // self.rows))
        return [(rows * chunk // count, rows * (chunk + 1) // count) for chunk in range(count)]


def plan_chunks(
    rows: int, hidden: int, vocab_local: int, dtype: torch.dtype, chunk_bytes: int, device: torch.device
) -> Chunks:
    """The fewest chunks of fp32 logits `[r, vocab_local]` that `chunk_bytes` hold with the temporaries beside them.

    Few and large, because each chunk goes over the whole matrix and over its gradient once more. Beside the logits are
    the blocks of the row operations, on the CPU, and what products of narrower operands than fp32 need: two
    `[columns, hidden]`, for which a quarter of the budget is set aside. At least half of the budget goes to logits:
    below some MiB, temporaries come on top. ValueError where the budget holds no row.
    """
    beside = _BLOCK_BYTES if device.type == "cpu" else 0
    columns = vocab_local
    if dtype != torch.float32:
        columns = min(max(chunk_bytes // 4 // (2 * 4 * hidden), _FEWEST_COLUMNS), vocab_local)
        beside += 2 * 4 * hidden * columns
    a_row = 4 * max(vocab_local, 1)
    most = max(chunk_bytes - beside, chunk_bytes // 2) // a_row
    if most < 1:
        raise ValueError(
            f"actor.logits_chunk_mb: {chunk_bytes} bytes are too few for one row of logits over {vocab_local} columns, "
            f"{a_row} bytes, and as much beside it; raise it to {(2 * a_row >> 20) + 1} or more"
        )
    return Chunks("whole" if rows <= most else "rows", min(most, max(rows, 1)), max(columns, 1))
