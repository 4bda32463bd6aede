"""Weight syncs of a running engine: afterwards it is the engine that a fresh start on those weights would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.config.world import World
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.vllm import vllm_layout
from grpo_mlm.rollout.request import Completion, Request, Sampling
from tests.rollout.host import EngineHost, ready, version
from tests.rollout.models import PROMPTS, encode, make_config
from tests.rollout.trainer import Trainer, receive

pytestmark = pytest.mark.slow

WORLD = World(tp=2, pp=2, dp=1, rollout_tp=1, num_engines=1, devices=4)
# Longer than two blocks of the prefix cache: what is kept of old weights would show.
LONG_PROMPTS = ("1+2=" * 20 + "7", "abc def " * 11, *PROMPTS)


@pytest.fixture(scope="module")
def engine(qwen3: Path) -> Iterator[EngineHost]:
    host = EngineHost(make_config(qwen3), qwen3, WORLD)
    yield host
    host.stop()


@pytest.fixture(scope="module")
def trainer(engine: EngineHost, qwen3: Path) -> Trainer:
    engine.call(ready)
    trainer = Trainer(WORLD, qwen3, engine)
    trainer.join()
    return trainer


def samples(engine: EngineHost, folder: Path) -> list[Completion]:
    """Greedy and seeded samples of the long prompts, twice, so that the second pass uses the prefix cache."""
    drawn = []
    for temperature in (0.0, 1.0):
        requests = [Request(g, 0, encode(folder, text), 100 + g) for g, text in enumerate(LONG_PROMPTS)]
        for _ in range(2):
            drawn += engine.generate(requests, Sampling(temperature, 24))
    return drawn


@pytest.fixture(scope="module")
def fresh_samples(qwen3_moved: Path) -> list[Completion]:
    """What an engine draws that was started on the moved weights."""
    host = EngineHost(make_config(qwen3_moved), qwen3_moved)
    try:
        return samples(host, qwen3_moved)
    finally:
        host.stop()


def same(some: list[Completion], others: list[Completion]) -> list[bool]:
    return [
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(some, others, strict=True)
    ]


def versions(drawn: list[Completion]) -> set[int]:
    return {done.weight_version for done in drawn}


def test_a_synced_engine_equals_a_fresh_one(
    trainer: Trainer, engine: EngineHost, qwen3: Path, qwen3_moved: Path, fresh_samples: list[Completion]
) -> None:
    """WSY-01: prefix cache on, tied head, two syncs; ids and log-probs equal bit for bit, greedy and seeded.

    ROL-05: so do the samples of two engines that share weights and seeds.
    """
    at_first = samples(engine, qwen3)
    reply = trainer.sync(qwen3_moved, version=1)
    moved = samples(engine, qwen3)
    assert all(same(moved, fresh_samples))
    assert not any(same(moved, at_first))
    trainer.sync(qwen3, version=2)
    back = samples(engine, qwen3)
    assert all(same(back, at_first))
    assert [versions(drawn) for drawn in (at_first, moved, back)] == [{-1}, {1}, {2}]
    shapes = vllm_layout(read_model_spec(qwen3), 1, 0).shapes
    assert reply == {"tensors": len(shapes), "bytes": 4 * sum(map(int, map(np.prod, shapes.values())))}


def test_an_update_that_breaks_off_stops_sampling_until_a_whole_one_arrives(
    trainer: Trainer, engine: EngineHost, qwen3: Path, qwen3_moved: Path, fresh_samples: list[Completion]
) -> None:
    """The old version's number stays, nothing is sampled from half-written weights, and a new sync heals it."""
    before = engine.call(version)
    outcomes = trainer.sync_that_breaks_off(
        qwen3_moved, 7, "decoder.layers.1.self_attention.linear_qkv.weight"
    )
    assert any(isinstance(outcome, KeyError) for outcome in outcomes[:-1])
    assert isinstance(outcomes[-1], RunFailure)
    assert engine.call(version) == before
    request = Request(0, 0, encode(qwen3, "1+2="), 1)
    with pytest.raises(RunFailure, match="broke off; sync again"):
        engine.generate([request], Sampling(1.0, 4))
    with pytest.raises(RunFailure, match="join again"):
        engine.call(receive, 8)
    trainer.join()
    trainer.sync(qwen3_moved, version=9)
    healed = samples(engine, qwen3)
    assert all(same(healed, fresh_samples))
    assert versions(healed) == {9}


def _receive_while_sampling(engine: Any, requests: list[Request]) -> None:
    drawing = engine.generate(requests, Sampling(1.0, 40))
    next(drawing)
    try:
        engine.receive_weights(10)
    finally:
        drawing.close()


def test_an_update_while_samples_are_drawn_is_refused(
    trainer: Trainer, engine: EngineHost, qwen3: Path
) -> None:
    """A sample belongs to one version of the weights. The engine goes on with the ones that it has."""
    before = engine.call(version)
    requests = [Request(g, i, encode(qwen3, text), i) for g, text in enumerate(PROMPTS) for i in range(4)]
    with pytest.raises(RunFailure, match="samples are being drawn"):
        engine.call(_receive_while_sampling, requests)
    assert versions(engine.generate(requests, Sampling(1.0, 4))) == {before}


def _join_as(engine: Any, folder: Path) -> None:
    ours, engine.shape = engine.shape, replace(engine.shape, model_folder=str(folder))
    try:
        engine.join("127.0.0.1", 1, 1, 2)
    finally:
        engine.shape = ours


def test_weights_that_are_not_the_engines_are_refused_by_name(
    trainer: Trainer, engine: EngineHost, qwen3: Path, llama: Path
) -> None:
    """WSY-09: a plan for another model: what is missing and what is too much, before any byte moves."""
    with pytest.raises(RunFailure) as error:
        engine.call(_join_as, llama)
    text = str(error.value)
    assert "model.layers.0.self_attn.q_norm.weight: in the engine, not in the plan" in text
    assert "lm_head.weight: in the plan, not in the engine" in text
    assert "down_proj" not in text
    trainer.join()


def test_two_sides_that_plan_differently_are_told(qwen3: Path) -> None:
    """Digests differ as soon as one side believes in other sizes."""
    shape = SyncShape(str(qwen3), 2, 2, 1, False, 1, 1)
    digests = {
        replace(shape, **size).plan().digest for size in ({}, {"tp": 1}, {"pp": 1}, {"num_engines": 2})
    }
    assert len(digests) == 4
