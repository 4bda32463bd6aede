"""How much of the logits exists at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grpo_mlm.kernels.blocked import BLOCK_ELEMENTS

_BLOCK_BYTES = 2 * 4 * BLOCK_ELEMENTS  # temporaries of the row operations in plain torch
_FEWEST_COLUMNS = 256  # narrower products are slow
_FEWEST_ROWS = {"cpu": 64, "cuda": 1024}
"""Each chunk of rows goes over the matrix and over its gradient once more. With fewer rows than these that takes longer
than the fourth product of tiles: 2 T H V FLOPs, against T / rows times 16 H V bytes on the CPU and 8 H V on a GPU."""

CPU_COLUMNS = 1024
"""Wider tiles fall out of the cache: one over 49152 columns and 1000 rows takes twice as long."""
TILES_ALIVE = 3  # fp32 tiles of the same size that are alive at once


@dataclass(frozen=True)
class Chunks:
    """`whole`: all rows of logits at once; `rows`: that many at a time; `columns`: all rows, that many columns at a
    time, twice. In the first two, products of bf16 operands take `columns` at a time, because they need fp32 copies."""

    mode: Literal["whole", "rows", "columns"]
    rows: int
    columns: int

    def cut(self, rows: int) -> list[tuple[int, int]]:
        """Begin and end of each chunk of rows, equally large but for one row; an empty one where there is no row."""
        count = max(1, -(-rows // self.rows))
        return [(rows * chunk // count, rows * (chunk + 1) // count) for chunk in range(count)]


def plan_chunks(
    rows: int, hidden: int, vocab_local: int, dtype: torch.dtype, chunk_bytes: int, device: torch.device
) -> Chunks:
    """The fewest chunks of fp32 logits `[r, vocab_local]` that `chunk_bytes` hold with the temporaries beside them, or
    tiles where those would be low.

    Beside the logits are the blocks of the row operations, on the CPU, and what products of narrower operands than fp32
    need: two `[columns, hidden]`, for which a quarter of the budget is set aside. At least half of the budget goes to
    logits: below some MiB, temporaries come on top. ValueError where the budget holds no row.
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
    if rows <= most:
        return Chunks("whole", max(rows, 1), max(columns, 1))
    if most < _FEWEST_ROWS.get(device.type, 1024):
        return Chunks("columns", rows, tile_columns(rows, chunk_bytes, device))
    return Chunks("rows", most, columns)


def tile_columns(rows: int, chunk_bytes: int, device: torch.device) -> int:
    """Columns of a tile of logits `[rows, columns]`, at least one."""
    most = max(1, chunk_bytes // (4 * TILES_ALIVE * max(rows, 1)))
    return most if device.type == "cuda" else min(most, CPU_COLUMNS)
