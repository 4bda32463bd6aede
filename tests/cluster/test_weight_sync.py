"""Weight syncs through Ray: real trainer ranks and a real engine that share devices, and what can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.cluster.placement import ray_cluster, reserve
from grpo_mlm.cluster.process import Process, wait
from grpo_mlm.cluster.start import start_engines, wait_until_ready
from grpo_mlm.cluster.weight_sync import WeightSync
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.engine.engine import MegatronEngine
from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.request import Completion, Request, Sampling
from grpo_mlm.small_models.tiny import make_qwen3
from tests.rollout.models import encode, make_config

pytestmark = pytest.mark.slow

WORLD = World(tp=2, pp=1, dp=1, rollout_tp=1, num_engines=1, devices=2)
START_S = 240.0
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


class Patient(MegatronEngine):
    """A trainer rank that can be made ill."""

    def poison(self, value: float) -> float:
        """Put a value into the first key weight of layer 1 on rank 1; the one that was there."""
        if self.place.rank != 1:
            return value
        fused = self.parameters()["decoder.layers.1.self_attention.linear_qkv.weight"]
        queries = self.spec.heads // self.spec.kv_heads * self.spec.head_dim
        before = float(fused[queries, 0])
        fused[queries, 0] = value
        return before

    def scale(self, factor: float) -> None:
        for weight in self.parameters().values():
            weight.mul_(factor)

    def fail_next(self) -> None:
        """Rank 1 sends nothing in the next sync: it stumbles."""

        def stumble(*_: object) -> int:
            raise ZeroDivisionError("a bug in the trainer")

        if self.place.rank == 1:
            self.sender.send = stumble  # type: ignore[method-assign, union-attr]


@dataclass(frozen=True)
class Stack:
    """What a run has, with weights `version` in the engine."""

    actor: ActorGroup
    engines: EngineGroup
    weights: WeightSync
    model: Path


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("sync")
    model = folder / "model"
    make_qwen3(model)
    config = make_config(model, bridge={"bucket_mb": 1, "verify": "full"})
    with (
        ray_cluster(config.cluster, "cpu", 2),
        reserve(2, "cpu", 60) as slots,
        start_engines(config, model, WORLD, slots, folder, "cpu") as engines,
    ):
        processes = [patient(config, model, rank, slots[rank], folder) for rank in range(2)]
        try:
            [(host, port)] = wait(processes[:1], [processes[0].submit("open_store")], "start", START_S)
            wait(processes, [process.submit("start", host, port) for process in processes], "start", START_S)
            actor = ActorGroup(processes, 1, config.actor, config.cluster.call_timeout_s)
            wait_until_ready(engines, START_S)
            weights = WeightSync(
                actor,
                engines,
                str(model),
                WORLD,
                colocated=True,
                te=False,
                nodes=["", ""],
                start_timeout_s=START_S,
            )
            yield Stack(actor, engines, weights, model)
        finally:
            for process in processes:
                process.kill()


def patient(config: Config, model: Path, rank: int, slot: object, folder: Path) -> Process:
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path(__file__).parents[2])}
    target = f"{__name__}:Patient"
    return Process(f"actor-{rank}", target, (config, model, WORLD, rank), slot, env, folder / "logs")


def sample(stack: Stack) -> list[Completion]:
    async def draw() -> list[Completion]:
        requests = [Request(i, 0, encode(stack.model, text), i) for i, text in enumerate(("1+2=", "7*8="))]
        return [done async for done in stack.engines.generate(requests, Sampling(1.0, 12))]

    return sorted(asyncio.run(draw()), key=lambda done: done.group_id)


def same(some: list[Completion], others: list[Completion]) -> bool:
    return all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(some, others, strict=True))


def test_a_sync_stamps_its_version_and_counts_what_it_did(stack: Stack) -> None:
    metrics = stack.weights.sync(0)
    assert {done.weight_version for done in sample(stack)} == {0}
    assert metrics["sync/version"] == 0
    assert metrics["sync/tensors"] > 0
    assert metrics["sync/bytes"] > 4 * metrics["sync/verified"] > 0


def test_nan_is_refused_by_name_and_the_engine_answers_with_its_old_weights(stack: Stack) -> None:
    """Before anything has moved."""
    stack.weights.sync(1)
    before = sample(stack)
    _, healthy = stack.actor.call("poison", float("nan"))
    with pytest.raises(RunFailure, match=K_PROJ.replace(".", r"\.")) as error:
        stack.weights.sync(2)
    assert "the engines keep version 1" in str(error.value)
    again = sample(stack)
    assert same(again, before)
    assert {done.weight_version for done in again} == {1}
    stack.actor.call("poison", healthy)
    stack.weights.sync(3)
    assert same(sample(stack), before)


def test_memory_is_given_up_and_a_sync_brings_everything_back(stack: Stack) -> None:
    """WSY-02, as a run does it after each step's sampling."""
    stack.weights.sync(4)
    before = sample(stack)
    stack.engines.call("release_memory")
    with pytest.raises(RunFailure, match="sync before sampling"):
        sample(stack)
    stack.weights.sync(5)
    after = sample(stack)
    assert same(after, before)
    assert {done.weight_version for done in after} == {5}


def test_a_sync_that_fails_shows_its_cause_and_the_next_one_heals(stack: Stack) -> None:
    """Not the consequence that the other ranks report: that a connection ended."""
    stack.weights.sync(6)
    before = sample(stack)
    stack.actor.call("fail_next")
    with pytest.raises(RunFailure, match="a bug in the trainer"):
        stack.weights.sync(7)
    with pytest.raises(RunFailure, match="sync before sampling"):
        sample(stack)
    stack.actor.call("scale", 1.5)
    stack.weights.sync(8)
    after = sample(stack)
    assert {done.weight_version for done in after} == {8}
    assert not same(after, before)
