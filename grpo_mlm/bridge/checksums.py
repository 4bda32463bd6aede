"""`bridge.verify`: every piece carries a checksum from where it is packed to where its tensor is assembled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grpo_mlm.bridge.buckets import Bucket
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import slices
from grpo_mlm.layouts.planner import Copy

SAMPLE = 16
"""`sample` checks one piece in so many, other ones at each version: after so many syncs, every piece."""

CHUNK = 1 << 18  # elements summed at a time; their 64-bit copies are all the memory that a checksum takes
# Of splitmix64, as signed numbers: they spread the places over all 64 bits.
_SPREAD, _MIX = 0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Verify:
    """Which pieces are checked in the sync that brings `version`."""

    mode: Literal["off", "sample", "full"] = "off"
    version: int = 0

    def chosen(self, bucket: Bucket) -> Iterator[int]:
        """Indices in the bucket's copies; the same on every rank."""
        for i in range(len(bucket.copies)):
            if self.mode == "full" or (
                self.mode == "sample" and (bucket.first + i - self.version) % SAMPLE == 0
            ):
                yield i

    def sign(self, bucket: Bucket, flat: Tensor) -> None:
        """On the source: write the checksums of the packed pieces."""
        chosen = list(self.chosen(bucket))
        if chosen:
            pieces = [piece for _, piece in bucket.views(flat)]
            bucket.checksums(flat)[chosen] = torch.stack([checksum(pieces[i]) for i in chosen])

    def signed(self, bucket: Bucket, flat: Tensor) -> Iterator[tuple[Copy, Tensor]]:
        """On the destination: the checked pieces, and the checksum that came with each (int64, no dimension)."""
        chosen = list(self.chosen(bucket))
        if chosen:
            sums = bucket.checksums(flat)[chosen]
            yield from zip((bucket.copies[i] for i in chosen), sums, strict=True)


def checksum(piece: Tensor) -> Tensor:
    """Depends on every element and its place; int64 without dimension, on the piece's device."""
    words = piece.contiguous().view(-1).view(_WORDS[piece.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=piece.device)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK].to(torch.int64)
        total += (_factors(start, len(chunk), piece.device) * chunk).sum()
    return total


def _factors(start: int, count: int, device: torch.device) -> Tensor:
    """A factor for each place, without relations between them: so no two likely faults cancel out."""
    places = torch.arange(start + 1, start + 1 + count, device=device) * _SPREAD
    places = (places ^ (places >> 30)) * _MIX
    return places ^ (places >> 27)


def compare(name: str, tensor: Tensor, signed: Sequence[tuple[Copy, Tensor]]) -> None:
    """RunFailure where a piece of an assembled tensor is not what its source packed."""
    if not signed:
        return
    ours = torch.stack([checksum(tensor[slices(copy.dst_box)]) for copy, _ in signed])
    wrong = (ours != torch.stack([value for _, value in signed])).nonzero().view(-1).tolist()
    if wrong:
        copy = signed[wrong[0]][0]
        raise RunFailure(
            f"{copy.tensor} {copy.box} was damaged between trainer rank {copy.src} and engine rank {copy.dst} "
            f"({len(wrong)} of {len(signed)} checked pieces of {name}; bridge.verify); sync again"
        )
