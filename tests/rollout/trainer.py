"""The trainer's side of a weight sync: every trainer rank as a thread of the test's process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mlm.bridge.buckets import schedule
from grpo_mlm.bridge.channel import Listener
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.group import JointGroup, join, open_store
from grpo_mlm.bridge.handoff import Outbox
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import send
from grpo_mlm.config.world import World
from tests.bridge.joint import TIMEOUT_S, at_once, fill
from tests.rollout.host import EngineHost

BUCKET_BYTES = 1 << 20  # as in the config of the tests, and so is the way of checking
VERIFY = "sample"
HOST = "127.0.0.1"
CPU = torch.device("cpu")


class Trainer:
    """Trainer ranks of the sizes in `world`, and the one engine that they serve."""

    def __init__(self, world: World, folder: Path, engine: EngineHost, colocated: bool = False) -> None:
        self.world, self.engine = world, engine
        recorded = engine.call(record)
        self.shape = SyncShape(str(folder), world.tp, world.pp, world.dp, False, 1, recorded, colocated)
        self.plan = self.shape.plan
        self.order = schedule(self.plan, self.shape.dtypes, BUCKET_BYTES, checked=True)
        self.groups: list[JointGroup] = []
        self.outboxes: dict[int, Outbox] = {}

    def join(self) -> None:
        """Meet the engine; it has to have planned the same transfer."""
        store = open_store(HOST)
        shape = self.shape
        listeners = [Listener() for _ in range(shape.engine_ranks if shape.colocated else 0)]
        # The engine gets a shape without the plan that was made here: it makes its own.
        plain = SyncShape(**{name: getattr(shape, name) for name in SyncShape.__dataclass_fields__})
        self.engine.start(join_trainer, HOST, store.port, [at.address for at in listeners], plain)
        calls = [
            lambda r=r: join(HOST, store.port, r, shape.group_size, CPU, TIMEOUT_S)
            for r in range(shape.trainers)
        ]
        self.groups = raised(at_once(calls)) if shape.colocated else []
        self.outboxes = {
            d: Outbox(at.accept(f"engine rank {d}", TIMEOUT_S), self._largest(d), CPU)
            for d, at in enumerate(listeners)
        }
        if not shape.colocated:
            *self.groups, digest = raised(at_once([*calls, self.engine.answer]))
        else:
            digest = self.engine.answer()
        assert digest == shape.digest

    def _largest(self, destination: int) -> int:
        return max(bucket.nbytes for bucket in self.order if bucket.dst == destination)

    def sync(self, weights: Path, version: int) -> dict[str, int]:
        """Send a folder's weights, and commit them; the engine's reply."""
        reply = raised(self._exchange(weights, version, without=None))[-1]
        self.engine.call(commit, version)
        return reply

    def sync_without_commit(self, weights: Path, version: int) -> None:
        raised(self._exchange(weights, version, without=None))

    def sync_that_breaks_off(self, weights: Path, version: int, tensor: str) -> list[Any]:
        """The ranks that own a tensor lose it in mid-transfer; outcomes of all ranks, then of the engine."""
        return self._exchange(weights, version, without=tensor)

    def _exchange(self, weights: Path, version: int, without: str | None) -> list[Any]:
        canonical = load_file(weights / "model.safetensors")
        held = [fill(layout, canonical) for layout in self.plan.sources]
        for params in held:
            params.pop(without or "", None)
        self.engine.start(receive, version)
        senders = (self._sender(r, params, version) for r, params in enumerate(held))
        return at_once([*senders, self.engine.answer])

    def _sender(self, rank: int, params: dict[str, Tensor], version: int) -> Callable[[], int]:
        verify, outbox, first = Verify(VERIFY, version), self.outboxes.get(rank), self.shape.first_destination
        return lambda: send(self.order, rank, params, self.groups[rank], first, verify, outbox)


def raised(outcomes: list[Any]) -> list[Any]:
    """The outcomes, if none of them is an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


# Run in the engine's process.
def record(engine: Any) -> list[dict[str, Any]]:
    return engine.record()


def join_trainer(engine: Any, host: str, port: int, handoffs: list[str], shape: SyncShape) -> str:
    return engine.join(host, port, handoffs, shape)


def receive(engine: Any, version: int) -> dict[str, int]:
    return engine.receive_weights(version)


def commit(engine: Any, version: int) -> None:
    engine.commit_weights(version)


def release(engine: Any) -> None:
    engine.release_memory()


def retake(engine: Any, part: str) -> None:
    engine.retake_memory(part)
