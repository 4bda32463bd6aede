"""Trainer ranks to engine ranks, both ways in the same processes, in turns.

Ours: every engine rank gets its own slices, each from the trainer rank that holds it.
The alternative, which most systems use: gather each tensor over the tensor-parallel ranks, rebuild the Hugging Face
tensors on one rank of each pipeline stage, broadcast them in buckets to all engine ranks, and slice there.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.gather_then_slice import Gather, Slice
from benchmarks.models import find_model
from benchmarks.result import Result, summary
from benchmarks.sizes import parse_sizes
from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.assemble import Assembly
from grpo_mlm.bridge.buckets import schedule
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.transfer import arrivals, send
from grpo_mlm.layouts.boxes import Layout, slices
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, canonical_tensors
from grpo_mlm.layouts.planner import make_plan
from grpo_mlm.layouts.vllm import vllm_layout

DTYPE = torch.bfloat16
TIMEOUT_S = 600.0
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """What every process needs to know."""

    spec: ModelSpec
    par: MegatronParallel
    dp: int
    rollout_tp: int
    replicas: int
    runs: int
    bucket_bytes: int
    rendezvous: str  # a file
    port: int
    sources: list[Layout] = field(init=False, compare=False)
    destinations: list[Layout] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        engine = [vllm_layout(self.spec, self.rollout_tp, rank) for rank in range(self.rollout_tp)]
        object.__setattr__(self, "sources", megatron_layouts(self.spec, self.par, self.dp))
        object.__setattr__(self, "destinations", engine * self.replicas)


@dataclass
class Timing:
    """Of one rank: seconds and received bytes of every run of both sides."""

    ours: list[float]
    theirs: list[float]
    our_bytes: int
    their_bytes: int


def measure(model: str, train: str, rollout: str, runs: int, bucket_mb: int) -> Result:
    """A row a side; seconds are those of the slowest rank."""
    t = parse_sizes(train, "--train", {"tp": 1, "pp": 1, "dp": 1})
    r = parse_sizes(rollout, "--rollout", {"tp": 1, "replicas": 1})
    store = bridge_group.open_store("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        case = Case(
            find_model(model), MegatronParallel(t["tp"], t["pp"]), t["dp"], r["tp"], r["replicas"], runs,
            bucket_mb << 20, str(Path(folder) / "meet"), store.port,
        )  # fmt: skip
        world = len(case.sources) + len(case.destinations)
        timings: list[Timing] = mp.get_context("spawn").Manager().list([None] * world)  # type: ignore[assignment]
        mp.spawn(_process, (case, timings), world)
    ours = [max(rank.ours[i] for rank in timings) for i in range(runs)]
    theirs = [max(rank.theirs[i] for rank in timings) for i in range(runs)]
    rows = [
        {
            "method": "slices (ours)",
            "bytes received": sum(rank.our_bytes for rank in timings),
            **summary(ours),
        },
        {"method": "gather, broadcast, slice", "bytes received": sum(rank.their_bytes for rank in timings)}
        | summary(theirs),
    ]
    for row in rows:
        row["time ratio"] = row["median s"] / rows[-1]["median s"]
    size = DTYPE.itemsize * sum(torch.Size(shape).numel() for shape in canonical_tensors(case.spec).values())
    notes = [
        f"{model}, {size / 1e9:.2f} GB in bfloat16, {train} to {rollout}",
        f"gloo on one machine, {runs} runs of each in turns; every engine rank ends with equal tensors",
    ]
    return Result("weight_sync", rows, notes)


def _process(rank: int, case: Case, timings: list[Timing]) -> None:
    torch.set_num_threads(1)
    world = len(case.sources) + len(case.destinations)
    dist.init_process_group("gloo", init_method=f"file://{case.rendezvous}", rank=rank, world_size=world)
    is_source = rank < len(case.sources)
    timing = _trainer(rank, case, world) if is_source else _engine(rank, case, world)
    timings[rank] = timing
    dist.destroy_process_group()


def _trainer(rank: int, case: Case, world: int) -> Timing:
    params = _weights(case.spec, case.sources[rank])
    order = schedule(make_plan(case.sources, case.destinations), DTYPE, case.bucket_bytes, src=rank)
    group = bridge_group.join("127.0.0.1", case.port, rank, world, CPU, TIMEOUT_S)
    gather = Gather(case, rank, params)
    timing = Timing([], [], 0, 0)
    for _ in range(case.runs + 1):
        timing.ours.append(_timed(lambda: send(order, rank, params, group, len(case.sources))))
        timing.theirs.append(_timed(gather.run))
    timing.their_bytes = gather.received
    return _warm(timing)


def _engine(rank: int, case: Case, world: int) -> Timing:
    me = rank - len(case.sources)
    layout = case.destinations[me]
    order = schedule(make_plan(case.sources, case.destinations), DTYPE, case.bucket_bytes, dst=me)
    group = bridge_group.join("127.0.0.1", case.port, rank, world, CPU, TIMEOUT_S)
    slicer = Slice(case, rank, layout)
    timing = Timing([], [], 0, 0)
    got: dict[str, Tensor] = {}

    def take() -> None:
        assembly = Assembly(layout, dict.fromkeys(layout.shapes, DTYPE), CPU, Verify())
        got.update(assembly.tensors(arrivals(order, me, CPU, group)))
        timing.our_bytes = assembly.received

    for _ in range(case.runs + 1):
        got.clear()
        timing.ours.append(_timed(take))
        timing.theirs.append(_timed(slicer.run))
    for name, tensor in slicer.tensors.items():
        assert torch.equal(tensor, got[name]), name
    timing.their_bytes = slicer.received
    return _warm(timing)


def _warm(timing: Timing) -> Timing:
    """Without the first run of each side, which connects the pairs and touches the memory."""
    return Timing(timing.ours[1:], timing.theirs[1:], timing.our_bytes, timing.their_bytes)


def _timed(work: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _weights(spec: ModelSpec, layout: Layout) -> dict[str, Tensor]:
    """A rank's tensors; every canonical element has its value from its place."""
    numbers = {name: i for i, name in enumerate(canonical_tensors(spec))}
    params = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        values = torch.tensor(numbers[piece.tensor] * 7)
        for axis, (start, stop) in enumerate(piece.box):
            along = torch.arange(start, stop) * (31 if axis == 0 else 1)
            values = values[..., None] + along if axis else values + along
        params[piece.local][slices(piece.local_box)] = (values % 251).to(DTYPE)
    return params
