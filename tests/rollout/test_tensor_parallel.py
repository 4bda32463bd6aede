"""An engine of two ranks, its weights from a trainer of two ranks, and the end of its worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mlm.config.world import World
from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.request import Request, Sampling
from tests.rollout.host import EngineHost, ready, version
from tests.rollout.models import PROMPTS, encode, load, make_config, reference
from tests.rollout.trainer_processes import TrainerProcesses
from tests.rollout.weights_in_use import slices_by_hand, weights_in_use

pytestmark = pytest.mark.slow

WORLD = World(tp=2, pp=1, dp=1, rollout_tp=2, num_engines=1, devices=2)
GONE_S = 60.0  # longest wait for a process to end; reached only by a test that fails


@dataclass(frozen=True)
class Pair:
    """An engine started on `first`, and a trainer that can send it `first` and `other`."""

    engine: EngineHost
    trainer: TrainerProcesses
    first: Path
    other: Path


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Tied over the joint group, untied by handoff; TP 2 on both sides. The last test of each ends the engine."""
    first, other = (request.getfixturevalue(request.param + suffix) for suffix in ("", "_moved"))
    engine = EngineHost(make_config(first, rollout={"tensor_model_parallel_size": 2}), first, WORLD)
    try:
        engine.call(ready)
        trainer = TrainerProcesses(first, 2, engine, colocated=request.param == "llama")
        try:
            trainer.join()
            yield Pair(engine, trainer, first, other)
        finally:
            trainer.stop()
    finally:
        engine.stop()


def check_samples(engine: EngineHost, weights: Path, number: int) -> None:
    """Greedy ids and log-probs are transformers' own for these weights, and carry the version's number."""
    model = load(weights)
    requests = [Request(g, 0, encode(weights, text), g) for g, text in enumerate(PROMPTS)]
    for request, done in zip(requests, engine.generate(requests, Sampling(0.0, 16)), strict=True):
        logprobs, picks = reference(model, request.prompt_ids, done.token_ids)
        assert picks.tolist() == done.token_ids.tolist()
        torch.testing.assert_close(torch.from_numpy(done.logprobs), logprobs, rtol=0, atol=1e-4)
        assert done.weight_version == number


def _weights(engine: Any) -> list[dict[str, Tensor]]:
    return engine._stepper.call(lambda: engine._engine.collective_rpc(weights_in_use))


def test_each_engine_rank_gets_its_own_slices(pair: Pair) -> None:
    """WSY-06: what each rank computes with are the slices of the new weights cut by hand, bit for bit."""
    check_samples(pair.engine, pair.first, -1)
    reply = pair.trainer.sync(pair.other, version=1)
    tensors = load_file(pair.other / "model.safetensors")
    for rank, weights in enumerate(pair.engine.call(_weights)):
        expected = slices_by_hand(tensors, layers=4, tp=2, rank=rank)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                weights[name], tensor, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )
    check_samples(pair.engine, pair.other, 1)
    again = pair.trainer.sync(pair.first, version=2)
    assert (again["tensors"], again["bytes"]) == (reply["tensors"], reply["bytes"])
    check_samples(pair.engine, pair.first, 2)


def test_a_trainer_rank_that_is_killed_stops_sampling_until_a_whole_sync(pair: Pair) -> None:
    """At once, not by the time-out; the old version's number stays."""
    before = pair.engine.call(version)
    with pytest.raises(RunFailure, match="bridge_receive failed"):
        pair.trainer.sync_while_the_last_rank_is_killed(pair.other, version=7)
    assert pair.engine.call(version) == before
    with pytest.raises(RunFailure, match="sync before sampling"):
        check_samples(pair.engine, pair.other, 7)
    pair.trainer.join()
    pair.trainer.sync(pair.other, version=8)
    check_samples(pair.engine, pair.other, 8)


def test_no_worker_outlives_its_engine(pair: Pair, request: pytest.FixtureRequest) -> None:
    """Neither after `shutdown`, nor when the engine's process is killed without a chance to say goodbye."""
    workers = pair.engine.call(_workers)
    assert len(alive(workers)) == 2
    if request.node.callspec.params["pair"] == "qwen3":
        pair.engine.call(_shut_down)
    else:
        assert pair.engine.process.pid
        os.kill(pair.engine.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while alive(workers):
        assert time.monotonic() < deadline, f"still there: {alive(workers)}"
        time.sleep(0.1)


def _workers(engine: Any) -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid]


def _shut_down(engine: Any) -> None:
    engine.shutdown()


def alive(pids: list[int]) -> list[int]:
    """Those that still run; one that has ended, but whose parent has not asked for its status, does not."""
    running = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            running.append(pid)
    return running
