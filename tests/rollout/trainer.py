"""The trainer's side of a weight sync: every trainer rank as a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mlm.bridge.group import JointGroup, join, open_store
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import schedule, send
from grpo_mlm.config.world import World
from tests.bridge.joint import TIMEOUT_S, at_once, fill
from tests.rollout.host import EngineHost

BUCKET_BYTES = 1 << 20  # as in the config of the tests
HOST = "127.0.0.1"


class Trainer:
    """Trainer ranks of the sizes in `world`, and the one engine that they serve."""

    def __init__(self, world: World, folder: Path, engine: EngineHost) -> None:
        self.world, self.engine = world, engine
        sizes = (world.tp, world.pp, world.dp, False, world.rollout_tp, world.num_engines)
        self.plan = SyncShape(str(folder), *sizes).plan()
        self.order = schedule(self.plan, 4, BUCKET_BYTES)
        self.groups: list[JointGroup] = []

    def join(self) -> None:
        """Meet the engine; it has to have planned the same transfer."""
        store = open_store(HOST)
        trainers, device = self.world.actor_world, torch.device("cpu")
        size = trainers + self.world.rollout_world
        self.engine.start(join_trainer, HOST, store.port, trainers, size)
        calls = [lambda r=r: join(HOST, store.port, r, size, device, TIMEOUT_S) for r in range(trainers)]
        *self.groups, digest = raised(at_once([*calls, self.engine.answer]))
        assert digest == self.plan.digest

    def sync(self, weights: Path, version: int) -> dict[str, int]:
        """Send a folder's weights; the engine's reply."""
        return raised(self._exchange(weights, version, without=None))[-1]

    def sync_that_breaks_off(self, weights: Path, version: int, tensor: str) -> list[Any]:
        """The ranks that own a tensor lose it in mid-transfer; outcomes of all ranks, then of the engine."""
        return self._exchange(weights, version, without=tensor)

    def _exchange(self, weights: Path, version: int, without: str | None) -> list[Any]:
        canonical = load_file(weights / "model.safetensors")
        held = [fill(layout, canonical) for layout in self.plan.sources]
        for params in held:
            params.pop(without or "", None)
        self.engine.start(receive, version)
        return at_once([*(self._sender(r, params) for r, params in enumerate(held)), self.engine.answer])

    def _sender(self, rank: int, params: dict[str, Tensor]) -> Callable[[], int]:
        first = self.world.actor_world
        return lambda: send(self.order, rank, params, torch.float32, self.groups[rank], first)


def raised(outcomes: list[Any]) -> list[Any]:
    """The outcomes, if none of them is an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def join_trainer(engine: Any, host: str, port: int, first: int, world: int) -> str:
    """Runs in the engine's process, as does `receive`."""
    return engine.join(host, port, first, world)


def receive(engine: Any, version: int) -> dict[str, int]:
    return engine.receive_weights(version)
