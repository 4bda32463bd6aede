"""The local handoff between two processes: shared memory, and the end of either side."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from grpo_mlm.bridge.buckets import schedule
from grpo_mlm.bridge.channel import Channel, Listener, connect
from grpo_mlm.bridge.handoff import Inbox, Outbox
from grpo_mlm.errors import PeerGone, RunFailure
from grpo_mlm.layouts.megatron import MegatronParallel
from tests.bridge.exchange import CPU, DENSE, plan_of, random_weights
from tests.bridge.joint import TIMEOUT_S, at_once, fill

PLAN = plan_of(DENSE, MegatronParallel(), 1, 1, 1, colocated=True)
ORDER = schedule(PLAN, torch.float32, 400)
LARGEST = max(bucket.nbytes for bucket in ORDER)


def engine_process(address: str, pipe: Connection, take: int) -> None:
    """Takes some buckets, says so, and is killed while it holds one."""
    inbox = Inbox(connect(address, "the trainer", TIMEOUT_S), CPU)
    for number, (_, flat) in enumerate(inbox.arrivals(ORDER, 0)):
        if number == take:
            pipe.send(flat.clone().numpy().tobytes())
            signal.pause()


def trainer_process(address: str, pipe: Connection, give: int) -> None:
    """Hands some buckets over and is killed before the next."""
    outbox = Outbox(connect(address, "the engine", TIMEOUT_S), LARGEST, CPU)
    for bucket in ORDER[:give]:
        outbox.free_slot(bucket.nbytes).fill_(7)
        outbox.hand_over()
    pipe.send(None)
    signal.pause()


def other_side(target: object, argument: int) -> tuple[multiprocessing.Process, Connection, Channel]:
    """A process that runs one of the above, connected."""
    listener, spawn = Listener(), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(listener.address, theirs, argument), daemon=True)
    process.start()
    return process, ours, listener.accept("the other side", TIMEOUT_S)


def leftovers() -> set[str]:
    return {str(path) for at in ("/dev/shm", tempfile.gettempdir()) for path in Path(at).glob("*grpo*")}


def test_an_engine_that_is_killed_ends_the_trainers_wait_at_once() -> None:
    before = leftovers()
    process, pipe, channel = other_side(engine_process, 3)
    outbox = Outbox(channel, LARGEST, CPU)

    def give() -> None:
        for number, bucket in enumerate(ORDER):
            outbox.free_slot(bucket.nbytes).fill_(number)
            outbox.hand_over()
        outbox.drain()

    def kill() -> bytes:
        seen = pipe.recv()
        os.kill(process.pid, signal.SIGKILL)
        return seen

    outcome, seen = at_once([give, kill])
    assert seen == bytes([3]) * ORDER[3].nbytes
    assert isinstance(outcome, PeerGone)
    assert "died or failed" in str(outcome)
    process.join()
    assert leftovers() == before


def test_a_trainer_that_is_killed_ends_the_engines_wait_at_once() -> None:
    process, pipe, channel = other_side(trainer_process, 2)
    inbox = Inbox(channel, CPU)
    taken = []

    def take() -> None:
        for _, flat in inbox.arrivals(ORDER, 0):
            taken.append(flat.tolist())

    def kill() -> None:
        pipe.recv()
        os.kill(process.pid, signal.SIGKILL)

    outcome, _ = at_once([take, kill])
    assert taken == [[7] * bucket.nbytes for bucket in ORDER[:2]]
    assert isinstance(outcome, PeerGone)
    process.join()


def pair(timeout_s: float) -> tuple[Outbox, Inbox]:
    listener = Listener()
    theirs = connect(listener.address, "the trainer", timeout_s)
    outbox = Outbox(listener.accept("the engine", timeout_s), LARGEST, CPU)
    return outbox, Inbox(theirs, CPU)


def test_a_wait_is_bounded() -> None:
    """An engine that takes nothing: the third bucket finds no slot. A trainer that gives nothing."""
    outbox, inbox = pair(0.2)
    for bucket in ORDER[:2]:
        outbox.free_slot(bucket.nbytes)
        outbox.hand_over()
    with pytest.raises(RunFailure, match="the engine: no word from it within"):
        outbox.free_slot(1)
    _, inbox = pair(0.2)
    with pytest.raises(RunFailure, match="the trainer: no word from it within"):
        next(inbox.arrivals(ORDER, 0))


def test_a_slot_is_filled_again_only_when_it_is_empty() -> None:
    """The engine reads slowly and still sees every bucket as it was handed over."""
    outbox, inbox = pair(TIMEOUT_S)
    params = fill(PLAN.sources[0], random_weights(DENSE))

    def give() -> None:
        for number, bucket in enumerate(ORDER):
            outbox.free_slot(bucket.nbytes).fill_(number % 251)
            outbox.hand_over()
        outbox.drain()

    def take() -> list[set[int]]:
        return [set(flat.tolist()) for _, flat in inbox.arrivals(ORDER, 0)]

    _, seen = at_once([give, take])
    assert seen == [{number % 251} for number in range(len(ORDER))]
    assert params


def test_nobody_listens_at_an_old_address() -> None:
    listener = Listener()
    listener.close()
    with pytest.raises(RunFailure, match="must be on one machine"):
        connect(listener.address, "trainer rank 0", 1.0)
