"""Trainer and engine on one GPU: device memory seen by two processes, and a whole run that shares it."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from grpo_mlm.bridge.assemble import Assembly
from grpo_mlm.bridge.buckets import pack, schedule
from grpo_mlm.bridge.channel import Listener, connect
from grpo_mlm.bridge.checksums import Verify, checksum
from grpo_mlm.bridge.handoff import Inbox, Outbox
from grpo_mlm.layouts.megatron import MegatronParallel
from tests.bridge.exchange import DENSE, plan_of, random_weights
from tests.bridge.joint import TIMEOUT_S, fill
from tests.e2e.command import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GPU = torch.device("cuda", 0)
PLAN = plan_of(DENSE, MegatronParallel(), 1, 1, 1, colocated=True)
DTYPES = [dict.fromkeys(PLAN.destinations[0].shapes, torch.bfloat16)]
ORDER = schedule(PLAN, DTYPES, 400, checked=True)


def trainer_process(address: str, pipe: Connection) -> None:
    outbox = Outbox(connect(address, "the engine", TIMEOUT_S), max(b.nbytes for b in ORDER), GPU)
    for version in (1, 2):
        held = fill(PLAN.sources[0], random_weights(DENSE, version))
        params = {name: tensor.to(GPU) for name, tensor in held.items()}
        for bucket in ORDER:
            slot = outbox.free_slot(bucket.nbytes)
            pack(bucket, params, slot)
            Verify("full", version).sign(bucket, slot)
            outbox.hand_over()
        outbox.drain()
    pipe.recv()  # the memory lives until the engine has left


def test_device_memory_is_handed_over_between_processes() -> None:
    """Two syncs through the same two slots; every piece checked on the device and equal to its cast."""
    listener, spawn = Listener(), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=trainer_process, args=(listener.address, theirs), daemon=True)
    process.start()
    inbox = Inbox(listener.accept("the trainer", TIMEOUT_S), GPU)
    for version in (1, 2):
        assembly = Assembly(PLAN.destinations[0], DTYPES[0], GPU, Verify("full", version))
        received = dict(assembly.tensors(inbox.arrivals(ORDER, 0)))
        assert assembly.verified == sum(len(bucket.copies) for bucket in ORDER)
        for name, tensor in fill(PLAN.destinations[0], random_weights(DENSE, version)).items():
            assert torch.equal(received[name].cpu(), tensor.bfloat16()), name
    ours.send(None)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


def test_a_checksum_is_the_same_on_both_devices() -> None:
    piece = torch.randn(700, 900, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert int(checksum(piece.to(GPU))) == int(checksum(piece))


def test_a_run_shares_one_gpu(tmp_path: Path) -> None:
    """The engine gives its memory up after each rollout and gets new weights before the next."""
    run = train(
        "tiny_dp2.yaml",
        tmp_path / "run",
        "cluster.device=cuda",
        "cluster.n_devices_per_node=1",
        "actor.megatron.data_parallel_size=1",
        "actor.dtype=bfloat16",
        "rollout.num_engines=1",
        "rollout.gpu_memory_utilization=0.3",
        "bridge.verify=full",
        "trainer.total_training_steps=2",
    )
    assert run.code == 0, run.output
    steps = [m for m in run.metrics if m["step"] > 0]
    assert [m["sync/version"] for m in steps] == [1, 2]
    assert all(m["rollout_corr/logprob_diff_max"] < 0.5 for m in steps)
