"""The receiving end: whole local tensors from the buckets that bring their pieces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import closing

import torch
from torch import Tensor

from grpo_mlm.bridge.buckets import Bucket, DTypes
from grpo_mlm.bridge.checksums import Verify, compare
from grpo_mlm.layouts.boxes import Layout, slices, volume
from grpo_mlm.layouts.planner import Copy

Arrivals = Generator[tuple[Bucket, Tensor]]
"""Buckets with their flat tensors, each of which may be used until the next one is asked for."""


class Assembly:
    """One update of one destination rank. After iterating, `received` bytes and `verified` pieces are counted."""

    def __init__(self, layout: Layout, dtypes: DTypes, device: torch.device, verify: Verify) -> None:
        self.layout, self.dtypes, self.device, self.verify = layout, dtypes, device, verify
        self.received = self.verified = 0
        self._missing = dict.fromkeys(layout.shapes, 0)  # elements that each tensor still waits for
        for piece in layout.pieces:
            self._missing[piece.local] += volume(piece.box)
        self._partial: dict[str, Tensor] = {}
        self._signed: dict[str, list[tuple[Copy, Tensor]]] = defaultdict(list)

    @torch.no_grad()
    def tensors(self, arriving: Arrivals) -> Generator[tuple[str, Tensor]]:
        """Each tensor, in its layout's shape, as soon as its last piece is in. Padding is zero.

        `arriving` is closed whatever happens, so that whoever sends hears of a failure here.
        """
        with closing(arriving):
            for name in [name for name, elements in self._missing.items() if elements == 0]:
                yield name, self._new(name)  # nothing but padding
            for bucket, flat in arriving:
                for name in self._take(bucket, flat):
                    tensor, signed = self._partial.pop(name), self._signed.pop(name, [])
                    compare(name, tensor, signed)
                    self.verified += len(signed)
                    yield name, tensor

    def _take(self, bucket: Bucket, flat: Tensor) -> list[str]:
        """Put the bucket's pieces in their places; names of the tensors that are whole now."""
        whole = []
        for copy, value in self.verify.signed(bucket, flat):
            self._signed[copy.dst_local].append((copy, value))
        for copy, piece in bucket.views(flat):
            name = copy.dst_local
            if name not in self._partial:
                self._partial[name] = self._new(name)
            self._partial[name][slices(copy.dst_box)] = piece
            self._missing[name] -= piece.numel()
            if self._missing[name] == 0:
                whole.append(name)
        self.received += bucket.payload
        return whole

    def _new(self, name: str) -> Tensor:
        return torch.zeros(self.layout.shapes[name], dtype=self.dtypes[name], device=self.device)
