"""Every parallel layout trains as one process does: losses, gradient norms, log-probs and weights (NUM-05)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.telemetry.reduce import reduce_metrics
from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import hf_logprobs, in_order, make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow

LAYOUTS = {
    "tp2": (2, 1, 1),
    "pp2": (1, 2, 1),
    "dp2": (1, 1, 2),
    "tp2 x pp2": (2, 2, 1),
    "tp2 x dp2": (2, 1, 2),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
}
LENGTHS = [(3, 5), (4, 12), (2, 1), (6, 30), (9, 0), (5, 7), (1, 2), (7, 9)]
MASKED = 5  # a sample that is in the batch but has no weight
ALONE = [[[0, 1, 2], [3, 4], [5, 6, 7]]]
# Other cuts than that of the run that they are compared with; each has an empty micro-batch.
ONE = [[[5, 6], [], [7, 0, 1], [2, 3, 4]]]
TWO = [[[3], [0, 4], [1]], [[7, 6], [2, 5], []]]
STEPS = 3


def make_step() -> tuple[RolloutBatch, np.ndarray]:
    batch = make_batch(LENGTHS)
    rng = np.random.default_rng(5)
    size = len(batch.rollout_logprobs)
    batch.old_logprobs = rng.normal(-5, 1.0, size).astype(np.float32)
    batch.ref_logprobs = rng.normal(-5, 0.5, size).astype(np.float32)
    trained = np.arange(len(batch)) != MASKED
    return batch, token_weights(batch.response_lens, trained, "token-mean").astype(np.float32)


def train(
    ranks: Ranks, folder: Any, world: Any, schedule: Any, distributed: bool = True
) -> tuple[list[dict[str, float]], dict[str, np.ndarray], list[np.ndarray]]:
    """Metrics of each step, the weights after the last, the log-probs of each training forward."""
    batch, weights = make_step()
    actor = {
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.01,
        "megatron": {"use_distributed_optimizer": distributed},
    }
    with ranks.engines(make_config(folder, actor), folder, world) as run:
        replies = run(jobs.update, batch, [schedule] * STEPS, weights)
        final = whole(folder, world, run(jobs.weights))
    steps = [[reply[i] for reply in replies] for i in range(STEPS)]
    metrics = [reduce_metrics([reply["metrics"] for reply in step]) for step in steps]
    return metrics, final, [in_order(batch, step, "logprobs") for step in steps]


@pytest.fixture(scope="module")
def alone(ranks: Ranks, model: Callable[..., Any]) -> dict[str, Any]:
    """The one-process run of each model."""
    return {
        name: train(ranks, model(family, **fields)[0], make_world(), ALONE)
        for name, (family, fields) in MODELS.items()
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_trains_as_one_process(
    layout: str, name: str, ranks: Ranks, model: Callable[..., Any], alone: dict[str, Any]
) -> None:
    family, fields = MODELS[name]
    world = make_world(*LAYOUTS[layout])
    schedule = TWO if world.dp == 2 else ONE
    metrics, final, logprobs = train(ranks, model(family, **fields)[0], world, schedule)
    assert_same_run(alone[name], (metrics, final, logprobs))


def test_plain_optimizer_trains_as_the_distributed_one(
    ranks: Ranks, model: Callable[..., Any], alone: dict[str, Any]
) -> None:
    folder, _ = model("qwen3")
    assert_same_run(alone["qwen3"], train(ranks, folder, make_world(dp=2), TWO, distributed=False))


def assert_same_run(expected: Any, actual: Any) -> None:
    for step, (one, many) in enumerate(zip(expected[0], actual[0], strict=True)):
        assert many == pytest.approx(one, rel=1e-5, abs=1e-6), f"metrics of step {step}"
    for one, many in zip(expected[2], actual[2], strict=True):
        np.testing.assert_allclose(many, one, atol=2e-5, rtol=0)
    assert actual[1].keys() == expected[1].keys()
    for name, one in expected[1].items():
        tolerance = 1e-5 * abs(one).max()
        np.testing.assert_allclose(actual[1][name], one, atol=tolerance, rtol=0, err_msg=name)


def test_the_steps_of_the_parity_runs_move_what_they_compare(
    model: Callable[..., Any], alone: dict[str, Any]
) -> None:
    """Every weight moves by far more than the tolerance, clipping is active, ratios are clipped on both sides."""
    metrics, final, _ = alone["qwen3"]
    for name, parameter in model("qwen3")[1].named_parameters():
        start = parameter.detach().numpy()
        assert abs(final[name] - start).max() > 1e-3 * abs(start).max(), name
    assert metrics[0]["actor/grad_norm"] > 0.5
    assert 0.1 < metrics[0]["actor/pg_clipfrac"] < 0.9
    assert len({step["actor/loss"] for step in metrics}) == STEPS


def test_more_ranks_than_query_groups(ranks: Ranks, model: Callable[..., Any]) -> None:
    """One key-value head on two tensor ranks: the cut goes through the fused q, k, v."""
    folder, _ = model("qwen3", num_key_value_heads=1, tie_word_embeddings=True)
    alone = train(ranks, folder, make_world(), ALONE)
    assert_same_run(alone, train(ranks, folder, make_world(tp=2), ONE))
    assert_same_run(alone, train(ranks, folder, make_world(tp=2, pp=2), ONE))


@pytest.mark.parametrize("layout", ["tp2 x pp2", "tp2 x dp2"])
def test_scoring_equals_transformers(layout: str, ranks: Ranks, model: Callable[..., Any]) -> None:
    folder, hf = model("qwen3")
    world = make_world(*LAYOUTS[layout])
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder), folder, world) as run:
        replies = run(jobs.score, batch, TWO if world.dp == 2 else ONE)
    assert sum(reply is not None for reply in replies) == world.dp
    expected = hf_logprobs(hf, batch)[0].detach().numpy()
    np.testing.assert_allclose(in_order(batch, replies, "logprobs"), expected, atol=1e-4, rtol=0)
