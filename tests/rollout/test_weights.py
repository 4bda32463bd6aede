"""Weight syncs of a running engine: afterwards it is the engine that a fresh start on those weights would be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mlm.bridge.sync_plan import same_on_all
from grpo_mlm.config.world import World
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout, volume
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.packed import pack_layout, unpack_layout
from grpo_mlm.layouts.vllm import vllm_layout
from grpo_mlm.rollout.request import Completion, Request, Sampling
from tests.rollout.host import EngineHost, ready, version
from tests.rollout.models import PROMPTS, encode, make_config
from tests.rollout.trainer import Trainer, commit, join_trainer, receive, record, release, retake

pytestmark = pytest.mark.slow

WORLD = World(tp=2, pp=2, dp=1, rollout_tp=1, num_engines=1, devices=4)
# Longer than two blocks of the prefix cache: what is kept of old weights would show.
LONG_PROMPTS = ("1+2=" * 20 + "7", "abc def " * 11, *PROMPTS)


@pytest.fixture(scope="module")
def engine(qwen3: Path) -> Iterator[EngineHost]:
    host = EngineHost(make_config(qwen3), qwen3, WORLD)
    yield host
    host.stop()


@pytest.fixture(scope="module", params=[False, True], ids=["disaggregated", "colocated"])
def trainer(engine: EngineHost, qwen3: Path, request: pytest.FixtureRequest) -> Trainer:
    engine.call(ready)
    trainer = Trainer(WORLD, qwen3, engine, colocated=request.param)
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
    trainer.sync(qwen3, version=0)
    at_first = samples(engine, qwen3)
    reply = trainer.sync(qwen3_moved, version=1)
    moved = samples(engine, qwen3)
    assert all(same(moved, fresh_samples))
    assert not any(same(moved, at_first))
    trainer.sync(qwen3, version=2)
    back = samples(engine, qwen3)
    assert all(same(back, at_first))
    assert [versions(drawn) for drawn in (at_first, moved, back)] == [{0}, {1}, {2}]
    layout = vllm_layout(read_model_spec(qwen3), 1, 0)
    size = 4 * sum(volume(piece.box) for piece in layout.pieces)
    assert (reply["tensors"], reply["bytes"]) == (len(layout.shapes), size)
    assert 0 < reply["verified"] < len(layout.pieces)


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
    with pytest.raises(RunFailure, match="sync before sampling"):
        engine.generate([request], Sampling(1.0, 4))
    with pytest.raises(RunFailure, match="has not arrived"):
        engine.call(commit, 7)
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


def test_weights_that_are_not_committed_are_not_sampled(
    trainer: Trainer, engine: EngineHost, qwen3: Path, qwen3_moved: Path, fresh_samples: list[Completion]
) -> None:
    """Another engine may have failed: this one has the new weights, and neither the old nor the new number."""
    trainer.join()
    before = engine.call(version)
    trainer.sync_without_commit(qwen3_moved, 11)
    with pytest.raises(RunFailure, match="sync before sampling"):
        samples(engine, qwen3)
    assert engine.call(version) == before
    engine.call(commit, 11)
    assert all(same(samples(engine, qwen3), fresh_samples))


def test_an_engine_that_gave_its_memory_up_samples_nothing_before_a_sync(
    trainer: Trainer, engine: EngineHost, qwen3: Path, qwen3_moved: Path, fresh_samples: list[Completion]
) -> None:
    """WSY-02: its weights are gone, whatever version it had; nor does the memory alone bring them back."""
    engine.call(release)
    with pytest.raises(RunFailure, match="sync before sampling"):
        samples(engine, qwen3)
    for part in ("weights", "kv_cache"):
        engine.call(retake, part)
    with pytest.raises(RunFailure, match="sync before sampling"):
        samples(engine, qwen3)
    with pytest.raises(RunFailure, match="has not arrived"):
        engine.call(commit, 11)
    for number in (12, 13):  # given up and taken back around each sync, as a run does
        engine.call(release)
        engine.call(retake, "weights")
        trainer.sync(qwen3_moved, number)
        engine.call(retake, "kv_cache")
    assert all(same(samples(engine, qwen3), fresh_samples))


@pytest.fixture
def recorded(engine: EngineHost) -> dict[str, Any]:
    [rank] = engine.call(record)
    return rank


def _change(recorded: dict[str, Any], rename: dict[str, str]) -> dict[str, Any]:
    """A recorded layout with other names of local tensors; "" drops one."""
    layout = unpack_layout(recorded["layout"])
    keep = [name for name in layout.shapes if rename.get(name) != ""]
    new = {name: rename.get(name, name) for name in keep}
    changed = Layout(
        {new[name]: layout.shapes[name] for name in keep},
        tuple(replace(piece, local=new[piece.local]) for piece in layout.pieces if piece.local in new),
        tuple((new[name], box) for name, box in layout.fills if name in new),
    )
    dtypes = {new[name]: recorded["dtypes"][name] for name in keep}
    return {"layout": pack_layout(changed), "dtypes": dtypes}


def test_weights_that_are_not_the_engines_are_refused_by_name(
    trainer: Trainer, engine: EngineHost, qwen3: Path, recorded: dict[str, Any]
) -> None:
    """WSY-09: one renamed, one missing (and so one that the trainer has too much), before any byte moves."""
    norm, q_norm = "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"
    renamed = replace(trainer.shape, recorded=[_change(recorded, {norm: "model.old_norm.weight"})])
    with pytest.raises(RunFailure) as error:
        engine.call(join_trainer, "127.0.0.1", 1, ["nobody"], renamed)
    assert f"{norm}: in the engine, not in the plan" in str(error.value)
    assert "model.old_norm.weight: in the plan, not in the engine" in str(error.value)
    assert "down_proj" not in str(error.value)
    missing = replace(trainer.shape, recorded=[_change(recorded, {q_norm: ""})])
    with pytest.raises(RunFailure) as error:
        missing.plan  # noqa: B018 - made when asked for
    assert q_norm in str(error.value)
    assert "taken by no destination" in str(error.value)
    trainer.join()


def test_a_model_that_is_not_the_engines_is_refused_by_name(engine: EngineHost, llama: Path) -> None:
    """The engine's loaders are asked for another model's tensors."""
    with pytest.raises(RunFailure, match=r"lm_head\.weight"):
        engine.call(_record_as, llama)


def _record_as(engine: Any, folder: Path) -> None:
    ours, engine.model_folder = engine.model_folder, folder
    try:
        engine.record()
    finally:
        engine.model_folder = ours


def test_two_sides_that_plan_differently_are_told(trainer: Trainer) -> None:
    """Digests differ as soon as one side believes in other sizes, precisions or placements."""
    shape = trainer.shape
    other = {**shape.recorded[0], "dtypes": dict.fromkeys(shape.recorded[0]["dtypes"], "bfloat16")}
    changes = (
        {},
        {"tp": 1},
        {"pp": 1},
        {"num_engines": 2},
        {"recorded": [other]},
        {"colocated": not shape.colocated},
    )
    assert len({replace(shape, **change).digest for change in changes}) == len(changes)


def test_engines_that_hold_different_weights_are_told(recorded: dict[str, Any]) -> None:
    other = _change(recorded, {"model.norm.weight": "model.old_norm.weight"})
    assert same_on_all([[recorded], [recorded]]) == [recorded]
    with pytest.raises(RunFailure, match="rank 0 of engine 1"):
        same_on_all([[recorded], [other]])
