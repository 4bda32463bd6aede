"""The plan of the weight sync. Trainer and engine ranks build it on their own and compare digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from grpo_mlm.bridge.buckets import DTypes
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.megatron import LOCAL, TE, MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.packed import pack_layout, unpack_layout
from grpo_mlm.layouts.planner import Plan, make_plan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Recorded:
    """What one engine rank's loaders take: boxes of canonical tensors, and the precision of each parameter."""

    layout: Layout
    dtypes: DTypes

    def packed(self) -> dict[str, Any]:
        """As plain values, which cross processes."""
        dtypes = {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()}
        return {"layout": pack_layout(self.layout), "dtypes": dtypes}

    @staticmethod
    def unpack(packed: Mapping[str, Any]) -> Recorded:
        dtypes = {name: getattr(torch, dtype) for name, dtype in packed["dtypes"].items()}
        return Recorded(unpack_layout(packed["layout"]), dtypes)


@dataclass(frozen=True)
class SyncShape:
    """All that the plan depends on; plain values, so that it crosses processes.

    Trainer ranks in Megatron's order are the sources, engine ranks in order the destinations. Devices are numbered:
    trainer rank r has number r; engine rank e has number e too where they are `colocated`, else the numbers go on.
    """

    model_folder: str
    tp: int
    pp: int
    dp: int
    te: bool  # whether the trainer uses Transformer Engine's names
    num_engines: int
    recorded: Sequence[dict[str, Any]]  # `Recorded.packed` of each rank of an engine; all engines are alike
    colocated: bool = False
    nodes: Sequence[str] = ()  # of every device; none given: all on one

    @property
    def trainers(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def rollout_tp(self) -> int:
        return len(self.recorded)

    @property
    def engine_ranks(self) -> int:
        return self.rollout_tp * self.num_engines

    @property
    def first_destination(self) -> int:
        """Rank in the joint group of the process that receives for destination 0; the others follow."""
        return 0 if self.colocated else self.trainers

    @property
    def group_size(self) -> int:
        """Ranks of the joint group: NCCL could not join two of one device, so a colocated engine is not in it."""
        return self.trainers if self.colocated else self.trainers + self.engine_ranks

    @cached_property
    def destinations(self) -> list[Recorded]:
        """Of every engine rank; ranks of the same number share an object."""
        return [Recorded.unpack(packed) for packed in self.recorded] * self.num_engines

    @cached_property
    def dtypes(self) -> list[DTypes]:
        """In which the tensors of every destination travel."""
        return [recorded.dtypes for recorded in self.destinations]

    @cached_property
    def plan(self) -> Plan:
        """Where several trainer ranks hold the same, the one on the engine rank's device or node sends it."""
        spec = read_model_spec(Path(self.model_folder))
        sources = megatron_layouts(
            spec, MegatronParallel(self.tp, self.pp), self.dp, TE if self.te else LOCAL
        )
        numbers = [
            *range(self.trainers),
            *range(self.first_destination, self.first_destination + self.engine_ranks),
        ]
        nodes = [self.nodes[number] for number in numbers] if self.nodes else None
        layouts = [recorded.layout for recorded in self.destinations]
        return make_plan(sources, layouts, [str(number) for number in numbers], nodes)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks just if they will cut and cast the same bytes."""
        dtypes = sorted(
            (rank, name, str(dtype)) for rank, of in enumerate(self.dtypes) for name, dtype in of.items()
        )
        return hashlib.sha256(f"{self.plan.digest} {dtypes} {self.colocated}".encode()).hexdigest()


def same_on_all(engines: Sequence[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    """What all engines recorded, a list of their ranks; RunFailure naming the first that differs from the first."""
    for number, recorded in enumerate(engines):
        if recorded != engines[0]:
            rank = next(r for r, (a, b) in enumerate(zip(engines[0], recorded, strict=True)) if a != b)
            raise RunFailure(f"rank {rank} of engine {number} holds other weights than that of engine 0")
    return engines[0]


def check_shapes(planned: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    """RunFailure listing every name or shape on which the plan and the engine's live model differ."""
    faults = [f"{name}: in the engine, not in the plan" for name in sorted(expected.keys() - planned.keys())]
    faults += [f"{name}: in the plan, not in the engine" for name in sorted(planned.keys() - expected.keys())]
    faults += [
        f"{name}: {planned[name]} planned, {expected[name]} in the engine"
        for name in sorted(planned.keys() & expected.keys())
        if planned[name] != expected[name]
    ]
    if faults:
        raise RunFailure("the engine's weights are not those of the plan:\n  " + "\n  ".join(faults[:20]))
