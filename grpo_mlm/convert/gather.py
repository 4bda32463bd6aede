"""Puts the target's tensors together from slices of the source, some rows at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from grpo_mlm.bridge.store import TensorStore
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box, Layout, intersect, slices, volume
from grpo_mlm.layouts.planner.copies import Copy

Rows = tuple[int, int]


class Gather:
    """Blocks of rows of the target's tensors, in their dtypes; padding is zero. Safe in threads.

    Holds at most one block and the slices that it is made of, however large the tensors are.
    """

    def __init__(
        self, store: TensorStore, target: Layout, copies: Iterable[Copy], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        self._store, self._target, self._dtypes = store, target, dtypes
        self._copies: dict[str, list[Copy]] = defaultdict(list)
        for copy in copies:
            self._copies[copy.dst_local].append(copy)
        self._starts: dict[str, list[int]] = {}
        self._tallest: dict[str, int] = {}
        for name, held in self._copies.items():
            held.sort(key=lambda copy: copy.dst_box)
            self._starts[name] = [copy.dst_box[0][0] for copy in held]
            self._tallest[name] = max(stop - start for start, stop in (copy.dst_box[0] for copy in held))

    def block(self, name: str, rows: Rows) -> Tensor:
        """Rows of one tensor: `[stop - start, ...]`, contiguous."""
        shape, dtype = self._target.shapes[name], self._dtypes[name]
        whole = (rows, *((0, n) for n in shape[1:]))
        parts = list(self._inside(name, whole))
        if len(parts) == 1 and parts[0][1] == whole:
            return self._cast(name, self._read(*parts[0]))
        padded = sum(volume(box) for _, box in parts) < volume(whole)
        new = torch.zeros if padded else torch.empty
        out = new([stop - start for start, stop in whole], dtype=dtype)
        for copy, box in parts:
            out[slices(_shifted(box, -rows[0]))] = self._cast(name, self._read(copy, box))
        return out

    def _cast(self, name: str, values: Tensor) -> Tensor:
        """In the target's dtype. UserError where a finite value has no place in it."""
        dtype = self._dtypes[name]
        if values.dtype == dtype:
            return values
        cast = values.to(dtype)
        lost = values.isfinite() & ~cast.isfinite()
        if lost.any():
            raise UserError(
                f"{name} holds {values[lost][0].item():g}, which {str(dtype).removeprefix('torch.')} cannot hold; "
                "choose another --dtype"
            )
        return cast

    def _read(self, copy: Copy, box: Box) -> Tensor:
        """Part `box` of the target's tensor, inside of the copy."""
        return self._store.read(copy.src_local, _source_box(copy, box))

    def _inside(self, name: str, whole: Box) -> Iterator[tuple[Copy, Box]]:
        """The copies that touch these rows, each with the part of the rows that it fills."""
        starts = self._starts.get(name, [])
        first = bisect_left(starts, whole[0][0] - self._tallest.get(name, 0))
        for copy in self._copies[name][first : bisect_left(starts, whole[0][1])]:
            box = intersect(copy.dst_box, whole)
            if box is not None:
                yield copy, box


def row_blocks(shape: tuple[int, ...], itemsize: int, block_bytes: int) -> list[Rows]:
    """Rows of a tensor in blocks of at most `block_bytes`, one row at least."""
    step = max(1, block_bytes // max(1, itemsize * prod(shape[1:])))
    return list(pairwise([*range(0, shape[0], step), shape[0]]))


def _source_box(copy: Copy, box: Box) -> Box:
    """Where part `box` of the target's tensor, inside of the copy, lies in the source's."""
    moves = (a - b for (a, _), (b, _) in zip(copy.src_box, copy.dst_box, strict=True))
    return tuple((start + move, stop + move) for (start, stop), move in zip(box, moves, strict=True))


def _shifted(box: Box, by: int) -> Box:
    """The box `by` rows further down."""
    (start, stop), *rest = box
    return ((start + by, stop + by), *rest)
