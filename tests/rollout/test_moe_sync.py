"""Experts through the whole bridge, by both placements: the engine is then one started on those weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_mlm.config.world import World
from grpo_mlm.rollout.request import Completion, Request, Sampling
from tests.rollout.host import EngineHost, ready
from tests.rollout.models import PROMPTS, encode, make_config, make_model, variant
from tests.rollout.test_moe_weights import in_use
from tests.rollout.trainer import Trainer

pytestmark = pytest.mark.slow

WORLD = World(tp=2, pp=2, dp=1, rollout_tp=1, num_engines=1, devices=4)


def samples(engine: EngineHost, folder: Path) -> list[Completion]:
    requests = [Request(g, 0, encode(folder, text), 100 + g) for g, text in enumerate(PROMPTS)]
    return [*engine.generate(requests, Sampling(0.0, 16)), *engine.generate(requests, Sampling(1.0, 16))]


def test_two_different_syncs_of_experts(tmp_path: Path) -> None:
    """WSY-03: what the kernels compute with, and every id and log-prob, bit for bit."""
    first = make_model("qwen3_moe", tmp_path / "first")
    moved = variant(first, tmp_path / "moved", seed=3)
    engine, fresh = (EngineHost(make_config(folder), folder, WORLD) for folder in (first, moved))
    try:
        for host in (engine, fresh):
            host.start(ready)
        for host in (engine, fresh):
            host.answer()
        expected = {
            moved: (in_use(fresh), samples(fresh, first)),
            first: (in_use(engine), samples(engine, first)),
        }
        number = 0
        for colocated in (False, True):
            trainer = Trainer(WORLD, first, engine, colocated)
            trainer.join()
            for folder in (moved, first, moved):
                number += 1
                trainer.sync(folder, number)
                weights, drawn = expected[folder]
                now = in_use(engine)
                assert [name for name in weights if not torch.equal(now[name], weights[name])] == []
                for a, b in zip(samples(engine, first), drawn, strict=True):
                    assert a.weight_version == number
                    np.testing.assert_array_equal(a.token_ids, b.token_ids)
                    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    finally:
        engine.stop()
        fresh.stop()
