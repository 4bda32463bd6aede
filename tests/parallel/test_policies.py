"""Old and reference policies: what they are taken from, and that training leaves them alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_mlm.telemetry.reduce import reduce_metrics
from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import hf_logprobs, in_order, make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow

LENGTHS = [(3, 5), (4, 12), (2, 1), (6, 8)]
SCHEDULE = [[[0, 1], [2, 3]]]
KL = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3"}


def uniform(batch: Any) -> np.ndarray:
    size = len(batch.rollout_logprobs)
    return np.full(size, 1 / size, dtype=np.float32)


def step_metrics(replies: list[Any]) -> list[dict[str, float]]:
    return [reduce_metrics([reply["metrics"] for reply in step]) for step in zip(*replies, strict=True)]


def test_ratio_is_one_at_first_and_not_after_a_step(ranks: Ranks, model: Callable[..., Any]) -> None:
    """LOSS-07: the old log-probs are those of the scoring pass, and stay."""
    folder, _ = model("qwen3")
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        batch.old_logprobs = in_order(batch, run(jobs.score, batch, [[[3, 1], [0, 2]]]), "logprobs").astype(
            np.float32
        )
        stored = batch.old_logprobs.copy()
        first, second = step_metrics(run(jobs.update, batch, [SCHEDULE] * 2, uniform(batch)))
    assert first["actor/ratio_max"] == pytest.approx(1, abs=1e-6)
    assert first["actor/ratio_min"] == pytest.approx(1, abs=1e-6)
    assert first["actor/ppo_kl"] == pytest.approx(0, abs=1e-6)
    assert second["actor/ratio_max"] > 1.01
    assert np.array_equal(stored, batch.old_logprobs)


def test_without_old_logprobs_the_training_forward_is_the_old_policy(
    ranks: Ranks, model: Callable[..., Any]
) -> None:
    """Same step, to the bit, as with log-probs scored beforehand in the same micro-batches."""
    folder, _ = model("qwen3")
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        scored = in_order(batch, run(jobs.score, batch, SCHEDULE), "logprobs")
        [[reply]] = run(jobs.update, batch, [SCHEDULE], uniform(batch))
        [implicit] = run(jobs.weights)
    assert np.array_equal(in_order(batch, [reply], "logprobs"), scored)
    assert reply["metrics"]["actor/ratio_max"].value == reply["metrics"]["actor/ratio_min"].value == 1.0
    batch.old_logprobs = scored.astype(np.float32)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        run(jobs.update, batch, [SCHEDULE], uniform(batch))
        [explicit] = run(jobs.weights)
    assert all(np.array_equal(implicit[name], explicit[name]) for name in explicit)


@pytest.mark.parametrize("world", [make_world(), make_world(tp=2, pp=2)], ids=["1", "tp2 x pp2"])
def test_reference_is_the_model_as_it_was_loaded(world: Any, ranks: Ranks, model: Callable[..., Any]) -> None:
    """After training: its weights to the bit, its log-probs those of the files, and the actor still moved on."""
    folder, hf = model("qwen3")
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder, KL), folder, world) as run:
        batch.ref_logprobs = in_order(batch, run(jobs.score, batch, SCHEDULE, "ref"), "logprobs").astype(
            np.float32
        )
        first, second = step_metrics(run(jobs.update, batch, [SCHEDULE] * 2, uniform(batch)))
        trained = whole(folder, world, run(jobs.weights))
        kept = whole(folder, world, run(jobs.reference))
        again = in_order(batch, run(jobs.score, batch, SCHEDULE, "ref"), "logprobs")
        after = whole(folder, world, run(jobs.weights))
    expected = hf_logprobs(hf, batch)[0].detach().numpy()
    np.testing.assert_allclose(batch.ref_logprobs, expected, atol=1e-4, rtol=0)
    assert np.array_equal(again.astype(np.float32), batch.ref_logprobs)
    assert first["actor/kl"] == pytest.approx(0, abs=1e-6)
    assert second["actor/kl"] > 1e-4
    for name, parameter in hf.named_parameters():
        assert np.array_equal(kept[name], parameter.detach().numpy()), name
        assert not np.array_equal(trained[name], kept[name]), name
        assert np.array_equal(trained[name], after[name]), name


def test_kl_term_adds_its_coefficient_times_the_kl(ranks: Ranks, model: Callable[..., Any]) -> None:
    """Loss with and without the term, on the same batch: policy metrics do not change (KL-07)."""
    folder, hf = model("qwen3")
    batch = make_batch(LENGTHS, ref_logprobs=np.full(26, -4.0, dtype=np.float32))
    metrics = []
    for actor in ({}, KL):
        with ranks.engines(make_config(folder, actor), folder, make_world()) as run:
            metrics += step_metrics(run(jobs.update, batch, [SCHEDULE], uniform(batch)))
    off, on = metrics
    d = hf_logprobs(hf, batch)[0].detach().numpy() + 4.0
    k3 = (np.exp(-d) + d - 1).mean()
    assert on["actor/kl"] == pytest.approx(k3, rel=1e-4)
    assert on["actor/loss"] == pytest.approx(off["actor/loss"] + 0.5 * k3, rel=1e-4)
    assert on["actor/pg_loss"] == pytest.approx(off["actor/pg_loss"], rel=1e-6)
    assert on["actor/pg_clipfrac"] == off["actor/pg_clipfrac"]


def test_without_a_kl_term_there_is_no_reference(ranks: Ranks, model: Callable[..., Any]) -> None:
    """KL-06: no weights kept, no KL metric."""
    folder, _ = model("qwen3")
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        assert run(jobs.reference) == [None]
        [metrics] = step_metrics(run(jobs.update, batch, [SCHEDULE], uniform(batch)))
    assert "actor/kl" not in metrics
