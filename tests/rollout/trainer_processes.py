"""The trainer's side of a weight sync as processes of their own, which can die."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from grpo_mlm.bridge.group import JointGroup, join, open_store
from grpo_mlm.bridge.hf_files import load_layout
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import schedule, send
from tests.bridge.joint import TIMEOUT_S
from tests.rollout.host import ANSWER_S, EngineHost
from tests.rollout.trainer import BUCKET_BYTES, HOST, join_trainer, receive


class TrainerProcesses:
    """One process a trainer rank of `shape`; its engines are the one `engine`."""

    def __init__(self, shape: SyncShape, engine: EngineHost) -> None:
        self.shape, self.engine = shape, engine
        self.size = shape.tp * shape.pp * shape.dp
        self.ranks = [_process() for _ in range(self.size)]

    def join(self) -> None:
        """Meet the engine, with a new process in place of one that died."""
        port = self.ranks[0].submit(_open).result(ANSWER_S)
        world = self.size + self.shape.rollout_tp * self.shape.num_engines
        self.engine.start(join_trainer, HOST, port, self.size, world)
        for joined in self._on_all(_join, port, world):
            joined.result(ANSWER_S)
        assert self.engine.answer() == self.shape.plan().digest

    def sync(self, weights: Path, version: int) -> dict[str, int]:
        """Send a folder's weights; the engine's reply, which has as many bytes as were sent."""
        self.engine.start(receive, version)
        sent = [sending.result(ANSWER_S) for sending in self._on_all(_send, self.shape, weights)]
        reply = self.engine.answer()
        assert min(sent) > 0
        return reply

    def sync_while_the_last_rank_is_killed(self, weights: Path, version: int) -> dict[str, int]:
        """The others send all that they owe, or fail; the engine's reply."""
        self.engine.start(receive, version)
        sending = [
            rank.submit(_send, self.shape, weights, number) for number, rank in enumerate(self.ranks[:-1])
        ]
        self.ranks[-1].submit(os.kill, self._pid(-1), signal.SIGKILL)
        for rank in sending:
            rank.exception(ANSWER_S)
        self.ranks[-1].shutdown()
        self.ranks[-1] = _process()
        return self.engine.answer()

    def stop(self) -> None:
        for rank in self.ranks:
            rank.shutdown()

    def _pid(self, rank: int) -> int:
        return self.ranks[rank].submit(os.getpid).result(ANSWER_S)

    def _on_all(self, function: Callable[..., Any], *args: Any) -> list[Future[Any]]:
        return [rank.submit(function, *args, number) for number, rank in enumerate(self.ranks)]


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


# Of each rank's process.
_store: dist.TCPStore | None = None
_group: JointGroup


def _open() -> int:
    global _store
    _store = open_store(HOST)
    return _store.port


def _join(port: int, world: int, rank: int) -> None:
    global _group
    _group = join(HOST, port, rank, world, torch.device("cpu"), TIMEOUT_S, _store)


def _send(shape: SyncShape, weights: Path, rank: int) -> int:
    plan = shape.plan()
    layout = plan.sources[rank]
    params = {name: torch.empty(extents) for name, extents in layout.shapes.items()}
    load_layout(weights, layout, params)
    order = schedule(plan, 4, BUCKET_BYTES)
    return send(order, rank, params, torch.float32, _group, len(plan.sources))
