"""The alternative to sending slices: whole tensors to everybody, cut where they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.layouts.boxes import Layout, Piece, slices
from grpo_mlm.layouts.model import canonical_tensors

if TYPE_CHECKING:
    from benchmarks.weight_sync import Case

IN_FLIGHT = 2  # buckets, as in ours
Names = list[str]


class Stages:
    """The process groups, and which whole tensors each pipeline stage broadcasts in which buckets."""

    def __init__(self, case: Case) -> None:
        tp, stage = case.par.tp, case.par.tp * case.dp
        engines = list(range(len(case.sources), len(case.sources) + len(case.destinations)))
        self.shapes = canonical_tensors(case.spec)
        self.tensor_groups, self.broadcast_groups, self.roots, self.buckets = [], [], [], []
        seen: set[str] = set()
        for p in range(case.par.pp):
            first = p * stage  # the first data-parallel replica sends
            self.roots.append(first)
            self.tensor_groups.append(dist.new_group(list(range(first, first + tp))))
            self.broadcast_groups.append(dist.new_group([first, *engines]))
            names = [n for n in dict.fromkeys(x.tensor for x in case.sources[first].pieces) if n not in seen]
            seen.update(names)
            self.buckets.append(list(self._pack(names, case.bucket_bytes)))

    def _pack(self, names: Names, most: int) -> Iterator[Names]:
        held, size = [], 0
        for name in names:
            n = 2 * torch.Size(self.shapes[name]).numel()
            if held and size + n > most:
                yield held
                held, size = [], 0
            held.append(name)
            size += n
        yield held

    def flat(self, names: Names) -> tuple[Tensor, dict[str, Tensor]]:
        """A bucket, and the whole tensors as views of it."""
        sizes = [torch.Size(self.shapes[name]).numel() for name in names]
        flat = torch.empty(sum(sizes), dtype=torch.bfloat16)
        parts = flat.split(sizes)
        return flat, {name: part.view(self.shapes[name]) for name, part in zip(names, parts, strict=True)}


class Gather:
    """A trainer rank's part."""

    def __init__(self, case: Case, rank: int, params: dict[str, Tensor]) -> None:
        self.stages, self.params, self.received = Stages(case), params, 0
        self.rank, self.tp = rank, case.par.tp
        self.stage = rank // (case.par.tp * case.dp)
        self.root = self.stages.roots[self.stage]
        self.sends = self.root <= rank < self.root + case.par.tp
        held = case.sources[self.root : self.root + case.par.tp]
        self.pieces: dict[str, list[tuple[int, Piece]]] = {}
        for t, layout in enumerate(held):
            for piece in layout.pieces:
                self.pieces.setdefault(piece.tensor, []).append((t, piece))

    def run(self) -> None:
        """Gather over the tensor ranks, rebuild on the first, broadcast."""
        self.received = 0
        if not self.sends:
            return
        flying: deque[tuple[dist.Work, Tensor]] = deque()
        gathered: dict[str, list[Tensor]] = {}
        for names in self.stages.buckets[self.stage]:
            needed = dict.fromkeys(piece.local for name in names for _, piece in self.pieces[name])
            gathered = {x: gathered[x] if x in gathered else self._gather(x) for x in needed}
            if self.rank != self.root:
                continue
            flat, whole = self.stages.flat(names)
            for name in names:
                for t, piece in self.pieces[name]:
                    whole[name][slices(piece.box)] = gathered[piece.local][t][slices(piece.local_box)]
            if len(flying) == IN_FLIGHT:
                flying.popleft()[0].wait()
            group = self.stages.broadcast_groups[self.stage]
            flying.append((dist.broadcast(flat, self.root, group=group, async_op=True), flat))
        for work, _ in flying:
            work.wait()

    def _gather(self, local: str) -> list[Tensor]:
        mine = self.params[local]
        if self.tp == 1:
            return [mine]
        shards = [torch.empty_like(mine) for _ in range(self.tp)]
        dist.all_gather(shards, mine, group=self.stages.tensor_groups[self.stage])
        self.received += mine.nbytes * (self.tp - 1)
        return shards


class Slice:
    """An engine rank's part."""

    def __init__(self, case: Case, rank: int, layout: Layout) -> None:
        self.stages, self.layout, self.received = Stages(case), layout, 0
        self.tensors: dict[str, Tensor] = {}
        by_tensor = sorted(layout.pieces, key=lambda piece: piece.tensor)
        self.pieces = {
            name: list(group) for name, group in groupby(by_tensor, key=lambda piece: piece.tensor)
        }

    def run(self) -> None:
        """Take every whole tensor of every stage, and keep the slices."""
        self.received = 0
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self.layout.shapes.items()
        }
        queue = [(stage, names) for stage, buckets in enumerate(self.stages.buckets) for names in buckets]
        flying: deque[tuple[dist.Work, Tensor, dict[str, Tensor]]] = deque()
        for stage, names in queue:
            flat, whole = self.stages.flat(names)
            root, group = self.stages.roots[stage], self.stages.broadcast_groups[stage]
            flying.append((dist.broadcast(flat, root, group=group, async_op=True), flat, whole))
            self.received += flat.nbytes
            if len(flying) == IN_FLIGHT:
                self._keep(*flying.popleft())
        while flying:
            self._keep(*flying.popleft())

    def _keep(self, work: dist.Work, flat: Tensor, whole: dict[str, Tensor]) -> None:
        work.wait()
        for name, tensor in whole.items():
            for piece in self.pieces[name]:
                self.tensors[piece.local][slices(piece.local_box)] = tensor[slices(piece.box)]
