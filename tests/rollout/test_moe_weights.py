"""Experts in a live engine: its layout recorded, and new weights put in through the reload, once and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from grpo_mlm.layouts.merge import merge_pieces
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec
from grpo_mlm.layouts.packed import pack_layout, unpack_layout
from grpo_mlm.layouts.vllm import vllm_layout
from grpo_mlm.rollout.request import Completion, Request, Sampling
from tests.bridge.joint import at_once, fill
from tests.rollout.host import EngineHost, ready
from tests.rollout.models import PROMPTS, encode, load, make_config, make_model, reference, variant
from tests.rollout.weights_in_use import weights_in_use

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Engines:
    """Two engines of one model, each started on other weights."""

    one: EngineHost
    other: EngineHost
    weights: Path  # those of `one`
    moved: Path  # those of `other`


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    at = tmp_path_factory.mktemp(request.param)
    weights = make_model(request.param, at / "weights")
    moved = variant(weights, at / "moved", seed=3)
    hosts = [EngineHost(make_config(folder), folder) for folder in (weights, moved)]
    try:
        for host in hosts:  # they start side by side
            host.start(ready)
        for host in hosts:
            host.answer()
        yield Engines(*hosts, weights, moved)
    finally:
        at_once([host.stop for host in hosts])


def samples(engine: EngineHost, folder: Path) -> list[Completion]:
    """Greedy and seeded."""
    requests = [Request(g, 0, encode(folder, text), 100 + g) for g, text in enumerate(PROMPTS)]
    return [
        done for temperature in (0.0, 1.0) for done in engine.generate(requests, Sampling(temperature, 24))
    ]


def same(some: list[Completion], others: list[Completion]) -> list[bool]:
    return [
        np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(some, others, strict=True)
    ]


def _on_worker(engine: Any, function: Any, *args: Any) -> Any:
    [answer] = engine._stepper.call(lambda: engine._engine.collective_rpc(function, args=args))
    return answer


def in_use(engine: EngineHost) -> dict[str, Tensor]:
    return engine.call(_on_worker, weights_in_use)


def _record(worker: Any, folder: Path) -> dict[str, Any]:
    from grpo_mlm.rollout.recorder import record_layout

    canonical = canonical_tensors(read_model_spec(folder))
    return pack_layout(record_layout(worker.model_runner.get_model(), canonical, torch.float32))


def _reload(worker: Any, folder: Path) -> None:
    """Put a folder's weights in by the layout that is recorded from the live model."""
    from vllm.config import set_current_vllm_config

    from grpo_mlm.rollout.reload import Reload

    layout = unpack_layout(_record(worker, folder))
    update = Reload(worker.model_runner.get_model(), worker.model_config)
    with set_current_vllm_config(worker.vllm_config):
        for name, tensor in fill(layout, load_file(folder / "model.safetensors")).items():
            update.load(name, tensor)
        update.finish()


def _reset_cache(engine: Any) -> None:
    engine._stepper.call(lambda: engine._engine.reset_prefix_cache())


def reload(engine: EngineHost, folder: Path) -> None:
    engine.call(_on_worker, _reload, folder)
    engine.call(_reset_cache)


def check_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []


def test_recording_a_live_engine_leaves_it_as_it_was(engines: Engines) -> None:
    """The layout is the hand-written one, each time; ids, log-probs and the kernels' weights stay bit for bit."""
    engine = engines.one
    before, used = samples(engine, engines.weights), in_use(engine)
    recorded = [engine.call(_on_worker, _record, engines.weights) for _ in range(2)]
    rule = vllm_layout(read_model_spec(engines.weights), 1, 0)
    assert recorded[0] == recorded[1]
    layout = unpack_layout(recorded[0])
    assert (layout.shapes, layout.pieces) == (rule.shapes, merge_pieces(rule.pieces))
    assert all(same(samples(engine, engines.weights), before))
    check_equal(in_use(engine), used)


def test_experts_that_are_loaded_twice_are_those_of_a_fresh_engine(engines: Engines) -> None:
    """WSY-03: the same weights twice change nothing; others, and the first again, are a fresh engine's bit for bit."""
    engine, folder = engines.one, engines.weights
    at_first, used = samples(engine, folder), in_use(engine)
    for _ in range(2):
        reload(engine, folder)
        check_equal(in_use(engine), used)
        assert all(same(samples(engine, folder), at_first))
    reload(engine, engines.moved)
    moved = samples(engine, folder)
    check_equal(in_use(engine), in_use(engines.other))
    assert all(same(moved, samples(engines.other, folder)))
    assert not any(same(moved, at_first))
    reload(engine, folder)
    check_equal(in_use(engine), used)
    assert all(same(samples(engine, folder), at_first))


def test_reloaded_experts_are_what_transformers_computes(engines: Engines) -> None:
    """Of the weights of the other folder: ids and log-probs of greedy samples."""
    reload(engines.one, engines.moved)
    model = load(engines.moved)
    requests = [Request(g, 0, encode(engines.moved, text), g) for g, text in enumerate(PROMPTS)]
    for request, done in zip(requests, engines.one.generate(requests, Sampling(0.0, 16)), strict=True):
        logprobs, picks = reference(model, request.prompt_ids, done.token_ids)
        assert picks.tolist() == done.token_ids.tolist()
        torch.testing.assert_close(torch.from_numpy(done.logprobs), logprobs, rtol=0, atol=1e-4)
    reload(engines.one, engines.weights)


def _begin_and_finish(worker: Any) -> None:
    from vllm.config import set_current_vllm_config

    from grpo_mlm.rollout.reload import Reload

    with set_current_vllm_config(worker.vllm_config):
        Reload(worker.model_runner.get_model(), worker.model_config).finish()


def test_an_update_without_any_weights_keeps_the_old_ones(engines: Engines) -> None:
    """What is forgotten at its beginning comes back at its end."""
    before, used = samples(engines.other, engines.moved), in_use(engines.other)
    engines.other.call(_on_worker, _begin_and_finish)
    check_equal(in_use(engines.other), used)
    assert all(same(samples(engines.other, engines.moved), before))
