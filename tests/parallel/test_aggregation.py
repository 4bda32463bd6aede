"""One loss and one gradient, however a step is cut into micro-batches and replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.data.batch import RolloutBatch
from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow

PLAIN = {"megatron": {"use_distributed_optimizer": False}}  # every replica then has all of the gradient


def batch_of_losses(lengths: Sequence[int], losses: Sequence[float]) -> RolloutBatch:
    """At ratio 1 a token's loss is minus its advantage."""
    advantages = -np.repeat(losses, lengths).astype(np.float32)
    return make_batch([(2, n) for n in lengths], advantages=advantages)


def loss_and_gradient(
    ranks: Ranks, folder: Path, batch: RolloutBatch, schedule: Any, mode: str = "token-mean"
) -> tuple[float, dict[str, np.ndarray]]:
    weights = token_weights(batch.response_lens, np.ones(len(batch), dtype=bool), mode)  # type: ignore[arg-type]
    world = make_world(dp=len(schedule))
    with ranks.engines(make_config(folder, PLAIN), folder, world) as run:
        replies = run(jobs.gradients, batch, schedule, weights.astype(np.float32))
    return sum(part for _, part in replies), whole(folder, world, [grads for grads, _ in replies])


def assert_same_gradient(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(actual[name], values, atol=1e-5 * abs(values).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("lengths", "losses", "expected", "cuts"),
    [
        ((2, 6), (1.0, 0.5), 0.625, ([[[0], [1]]], [[[0]], [[1]]])),
        ((1, 2, 3, 4), (4, 3, 2, 1), 2.0, ([[[0], [1], [2], [3]]], [[[3], [0]], [[1, 2], []]])),
    ],
)
def test_token_mean_does_not_depend_on_the_cut(
    lengths: Any, losses: Any, expected: float, cuts: Any, ranks: Ranks, model: Callable[..., Any]
) -> None:
    """AGG-01, AGG-03: one micro-batch, several, and two replicas."""
    folder, _ = model("llama", tie_word_embeddings=True)
    batch = batch_of_losses(lengths, losses)
    loss, gradient = loss_and_gradient(ranks, folder, batch, [[list(range(len(lengths)))]])
    assert loss == pytest.approx(expected, rel=1e-6)
    for cut in cuts:
        other_loss, other = loss_and_gradient(ranks, folder, batch, cut)
        assert other_loss == pytest.approx(expected, rel=1e-6)
        assert_same_gradient(other, gradient)


def test_four_replicas_neither_divide_nor_multiply(ranks: Ranks, model: Callable[..., Any]) -> None:
    """AGG-02: all losses 1, a sequence mean over four replicas is 1, and the gradient that of one process."""
    folder, _ = model("llama", tie_word_embeddings=True)
    batch = batch_of_losses((3, 1, 5, 2), (1.0,) * 4)
    mode = "seq-mean-token-mean"
    loss, gradient = loss_and_gradient(ranks, folder, batch, [[[0]], [[1]], [[2]], [[3]]], mode)
    assert loss == pytest.approx(1.0, rel=1e-6)
    assert_same_gradient(gradient, loss_and_gradient(ranks, folder, batch, [[[0, 1, 2, 3]]], mode)[1])


def test_masked_micro_batch_adds_nothing(ranks: Ranks, model: Callable[..., Any]) -> None:
    """NUM-02: a sample without weight, alone in its micro-batch, with cells that would poison a gradient."""
    folder, _ = model("llama", tie_word_embeddings=True)
    batch = make_batch([(2, 4), (3, 3), (4, 5)])
    batch.old_logprobs = np.full(12, -3.0, dtype=np.float32)
    trained = np.array([True, False, True])
    weights = token_weights(batch.response_lens, trained, "token-mean").astype(np.float32)
    masked = slice(4, 7)
    batch.old_logprobs[masked] = [np.nan, -np.inf, -200.0]
    batch.advantages[masked] = np.nan
    with ranks.engines(make_config(folder, PLAIN), folder, make_world()) as run:
        [(with_it, loss)] = run(jobs.gradients, batch, [[[0], [1], [2]]], weights)
        [(without, expected)] = run(jobs.gradients, batch, [[[0], [2]]], weights)
        [(nothing, zero)] = run(jobs.gradients, batch, [[[1]]], weights)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_same_gradient(with_it, without)
    assert zero == 0
    assert not any(values.any() for values in nothing.values())
