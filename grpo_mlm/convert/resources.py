"""Whether there is memory and disk enough, before the first byte is written."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path

from grpo_mlm.convert.workers import BLOCKS_IN_FLIGHT
from grpo_mlm.errors import OutOfResources
from grpo_mlm.layouts.boxes import Layout

BLOCK_BYTES = 16 << 20
_WIDEST_ITEM = 8  # bytes of a float64


@dataclass(frozen=True)
class Budget:
    """How much is read at a time, and by how many workers."""

    block_bytes: int
    workers: int


def memory_budget(memory_limit: int, workers: int, target: Layout) -> Budget:
    """Blocks and workers that fit into `memory_limit` bytes. Blocks do not depend on the number of workers.

    OutOfResources where not even the widest row fits.
    """
    widest = max((_WIDEST_ITEM * prod(shape[1:]) for shape in target.shapes.values()), default=1)
    least = BLOCKS_IN_FLIGHT * widest
    if memory_limit < least:
        raise OutOfResources(
            f"--memory-limit of {memory_limit} bytes is too small for this model; the least that works is {least}"
        )
    block = min(BLOCK_BYTES, memory_limit // BLOCKS_IN_FLIGHT)
    return Budget(block, max(1, min(workers, memory_limit // (BLOCKS_IN_FLIGHT * block))))


def check_disk(folder: Path, needed: int) -> None:
    """OutOfResources where the disk of `folder`, which need not be there yet, has less than `needed` bytes left."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise OutOfResources(
            f"{folder}: {needed:,} bytes are needed, its disk has {free:,} left; free some, or choose another disk"
        )
