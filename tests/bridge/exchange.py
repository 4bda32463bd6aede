"""All ranks of a sync as threads of this process: sources that send, destinations that assemble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grpo_mlm.bridge.assemble import Assembly
from grpo_mlm.bridge.buckets import DTypes, schedule
from grpo_mlm.bridge.channel import Listener, connect
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.handoff import Inbox, Outbox
from grpo_mlm.bridge.transfer import arrivals, send
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, Rope, canonical_tensors
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.spec import Moe
from grpo_mlm.layouts.vllm import vllm_layout
from tests.bridge.joint import TIMEOUT_S, at_once, meet

DENSE = ModelSpec("qwen2", 8, 4, 4, 2, 4, 12, 70, False, True, False, False, 1e-6, Rope(10000.0), 64)
EXPERTS = ModelSpec(
    "qwen3_moe",
    8,
    4,
    4,
    4,
    4,
    20,
    70,
    False,
    False,
    False,
    True,
    1e-6,
    Rope(10000.0),
    64,
    Moe(8, 2, 12, True),
)
CPU = torch.device("cpu")
Mode = Literal["off", "sample", "full"]


def random_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make) for name, shape in canonical_tensors(spec).items()}


def plan_of(
    spec: ModelSpec,
    trainer: MegatronParallel,
    dp: int,
    engine_tp: int,
    engines: int,
    colocated: bool = False,
    ep: bool = False,
) -> Plan:
    sources = megatron_layouts(spec, trainer, dp)
    destinations = [vllm_layout(spec, engine_tp, rank, ep) for rank in range(engine_tp)] * engines
    first = 0 if colocated else len(sources)
    numbers = [*range(len(sources)), *range(first, first + len(destinations))]
    return make_plan(sources, destinations, [str(number) for number in numbers])


class Exchange:
    """The ranks of a plan, connected; with `colocated`, destination d shares a device with source d."""

    def __init__(
        self,
        plan: Plan,
        colocated: bool = False,
        bucket_bytes: int = 400,
        dtypes: torch.dtype | Sequence[DTypes] = torch.float32,
        mode: Mode = "off",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.plan, self.mode = plan, mode
        self.first = 0 if colocated else len(plan.sources)
        self.order = schedule(plan, dtypes, bucket_bytes, checked=mode != "off")
        ranks = range(len(plan.destinations))
        if isinstance(dtypes, torch.dtype):
            self.dtypes: Sequence[DTypes] = [
                dict.fromkeys(plan.destinations[d].shapes, dtypes) for d in ranks
            ]
        else:
            self.dtypes = dtypes
        self.groups = meet(len(plan.sources) + (0 if colocated else len(ranks)), timeout_s)
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        for d in ranks if colocated else ():
            self.outboxes[d], self.inboxes[d] = self._hand_in_hand(d, timeout_s)

    def _hand_in_hand(self, d: int, timeout_s: float) -> tuple[Outbox, Inbox]:
        listener = Listener()
        theirs = connect(listener.address, f"trainer rank {d}", timeout_s)
        ours = listener.accept(f"engine rank {d}", timeout_s)
        outbox = Outbox(ours, max(bucket.nbytes for bucket in self.order if bucket.dst == d), CPU)
        return outbox, Inbox(theirs, CPU)

    def sender(self, rank: int, params: Mapping[str, Tensor], version: int = 0) -> Callable[[], int]:
        """The work of a source rank; its result is the bytes that it owes."""
        verify, outbox = Verify(self.mode, version), self.outboxes.get(rank)
        return lambda: send(self.order, rank, params, self.groups[rank], self.first, verify, outbox)

    def arrivals(self, rank: int) -> Any:
        if rank in self.inboxes:
            return self.inboxes[rank].arrivals(self.order, rank)
        return arrivals(self.order, rank, CPU, self.groups[self.first + rank])

    def assembly(self, rank: int, version: int = 0) -> Assembly:
        return Assembly(self.plan.destinations[rank], self.dtypes[rank], CPU, Verify(self.mode, version))

    def receiver(self, rank: int, version: int = 0) -> Callable[[], tuple[dict[str, Tensor], Assembly]]:
        """The work of a destination rank; its result is what it got."""

        def work() -> tuple[dict[str, Tensor], Assembly]:
            assembly = self.assembly(rank, version)
            received = list(assembly.tensors(self.arrivals(rank)))
            assert len({name for name, _ in received}) == len(received), "a tensor came twice"
            return dict(received), assembly

        return work

    def run(
        self, params: Sequence[Mapping[str, Tensor]], version: int = 0
    ) -> tuple[list[int], list[tuple[dict[str, Tensor], Assembly]]]:
        """One whole sync: results of all senders, then of all receivers; the first exception is raised."""
        calls: list[Callable[[], Any]] = [self.sender(r, held, version) for r, held in enumerate(params)]
        calls += [self.receiver(d, version) for d in range(len(self.plan.destinations))]
        outcomes = at_once(calls)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes[: len(params)], outcomes[len(params) :]
