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

from grpo_mlm.bridge.buckets import Bucket, schedule
from grpo_mlm.bridge.channel import Listener
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.group import JointGroup, join, open_store
from grpo_mlm.bridge.handoff import Outbox
from grpo_mlm.bridge.hf_files import load_layout
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import send
from tests.bridge.joint import TIMEOUT_S
from tests.rollout.host import ANSWER_S, EngineHost
from tests.rollout.trainer import BUCKET_BYTES, CPU, HOST, VERIFY, commit, join_trainer, receive, record


class TrainerProcesses:
    """One process a trainer rank, TP only; its engine is the one `engine`."""

    def __init__(self, folder: Path, tp: int, engine: EngineHost, colocated: bool) -> None:
        self.engine = engine
        self.shape = SyncShape(str(folder), tp, 1, 1, False, 1, engine.call(record), colocated)
        self.ranks = [_process() for _ in range(tp)]

    def join(self) -> None:
        """Meet the engine, with a new process in place of one that died."""
        port = self.ranks[0].submit(_open).result(ANSWER_S)
        hosts = self.ranks[: self.shape.engine_ranks] if self.shape.colocated else []
        handoffs = [rank.submit(_listen).result(ANSWER_S) for rank in hosts]
        self.engine.start(join_trainer, HOST, port, handoffs, self.shape)
        digests = {joined.result(ANSWER_S) for joined in self._on_all(_join, port, self.shape)}
        assert digests == {self.engine.answer()}

    def sync(self, weights: Path, version: int) -> dict[str, int]:
        """Send a folder's weights, and commit them; the engine's reply, which has as many bytes as were sent."""
        self.engine.start(receive, version)
        sent = [sending.result(ANSWER_S) for sending in self._on_all(_send, weights, version)]
        reply = self.engine.answer()
        assert min(sent) > 0
        assert sum(sent) == reply["bytes"]
        self.engine.call(commit, version)
        return reply

    def sync_while_the_last_rank_is_killed(self, weights: Path, version: int) -> dict[str, int]:
        """The others send all that they owe, or fail; the engine's reply."""
        self.engine.start(receive, version)
        sending = [
            rank.submit(_send, weights, version, number) for number, rank in enumerate(self.ranks[:-1])
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
_listener: Listener | None = None
_shape: SyncShape
_order: list[Bucket]
_group: JointGroup
_outbox: Outbox | None = None


def _open() -> int:
    global _store
    _store = open_store(HOST)
    return _store.port


def _listen() -> str:
    global _listener
    _listener = Listener()
    return _listener.address


def _join(port: int, shape: SyncShape, rank: int) -> str:
    global _shape, _order, _group, _outbox
    _shape, _order = shape, schedule(shape.plan, shape.dtypes, BUCKET_BYTES, checked=True)
    _group = join(HOST, port, rank, shape.group_size, CPU, TIMEOUT_S, _store)
    if _listener is not None:
        largest = max(bucket.nbytes for bucket in _order if bucket.dst == rank)
        _outbox = Outbox(_listener.accept(f"engine rank {rank}", TIMEOUT_S), largest, CPU)
    return shape.digest


def _send(weights: Path, version: int, rank: int) -> int:
    layout = _shape.plan.sources[rank]
    params = {name: torch.empty(extents) for name, extents in layout.shapes.items()}
    load_layout(weights, layout, params)
    verify = Verify(VERIFY, version)
    return send(_order, rank, params, _group, _shape.first_destination, verify, _outbox)
