"""Where the rows of a stored tensor's merged form lie in its chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import product
from math import prod
from typing import NamedTuple

from grpo_mlm.bridge.dist_format import Chunk, StoredTensor


class Run(NamedTuple):
    """Rows [first, last) of columns [left, right) lie in `chunk` from its row `row` on, one after the other."""

    first: int
    last: int
    left: int
    right: int
    chunk: Chunk
    row: int


class Runs:
    """All runs of one tensor. `dimensions`: 2 where its merged form is a matrix, 1 where it is a vector, whose
    elements are taken for rows of one column. ValueError: the chunks are not as large as the tensor."""

    def __init__(self, stored: StoredTensor, dimensions: int) -> None:
        held = sum(prod(chunk.sizes) for chunk in stored.chunks)
        if held != prod(stored.shape):
            raise ValueError(f"its chunks hold {held} elements of {prod(stored.shape)}")
        unsorted = (run for chunk in stored.chunks for run in _runs(stored.shape, chunk, dimensions))
        self.runs = sorted(unsorted, key=lambda run: run[:4])
        self.longest = max((run.last - run.first for run in self.runs), default=0)

    def meeting(self, top: int, bottom: int) -> Iterator[Run]:
        """Those with rows in [top, bottom), and few others."""
        start = bisect_left(self.runs, top - self.longest, key=lambda run: run.first)
        for i in range(start, len(self.runs)):
            if self.runs[i].first >= bottom:
                return
            yield self.runs[i]


def _runs(shape: tuple[int, ...], chunk: Chunk, dimensions: int) -> Iterator[Run]:
    """A chunk's rows are consecutive up to the innermost axis that it does not span."""
    offsets, sizes = chunk.offsets, chunk.sizes
    if dimensions == 1:
        shape, offsets, sizes = (*shape, 1), (*offsets, 0), (*sizes, 1)
    *axes, _ = shape
    left, right = offsets[-1], offsets[-1] + sizes[-1]
    strides = [prod(axes[i + 1 :]) for i in range(len(axes))]  # in rows
    inner = len(axes) - 1
    while inner > 0 and sizes[inner] == axes[inner]:
        inner -= 1
    length = sizes[inner] * strides[inner]
    outer = product(*(range(o, o + n) for o, n in zip(offsets[:inner], sizes[:inner], strict=True)))
    for i, index in enumerate(outer):
        first = sum(x * stride for x, stride in zip((*index, offsets[inner]), strides, strict=False))
        yield Run(first, first + length, left, right, chunk, i * length)
