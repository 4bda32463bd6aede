"""Weights of tokens: hand-made denominators, and the same step however it is cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.algorithms.grpo_loss import token_losses
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig


def step(
    losses: list[list[float]], cut: list[list[int]], weights: np.ndarray
) -> tuple[list[float], np.ndarray]:
    """Loss of each piece of the cut, and the gradient by every token's log-prob, through the real loss function.

    At ratio 1 the loss of a token is minus its advantage, and so is its derivative by the log-prob.
    """
    flat = torch.tensor([x for row in losses for x in row], dtype=torch.float64)
    starts = np.cumsum([0] + [len(row) for row in losses])
    logprobs = torch.full_like(flat, -1.0).requires_grad_()
    parts = []
    for samples in cut:
        index = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in samples] or [np.zeros(0, int)])
        at = torch.from_numpy(index.astype(np.int64))
        w = torch.from_numpy(weights)[at]
        tokens = LossTokens(-flat[at], w, torch.zeros_like(at))
        actor, correction = ActorConfig(), RolloutCorrectionConfig()
        loss = token_losses(logprobs[at], torch.zeros_like(w), tokens, actor, correction)[0].sum()
        loss.backward()
        parts.append(loss.item())
    assert logprobs.grad is not None
    return parts, logprobs.grad.numpy()


def weights_of(losses: list[list[float]], mode: Any = "token-mean", **kwargs: Any) -> np.ndarray:
    lens = np.array([len(row) for row in losses])
    return token_weights(lens, np.ones(len(losses), dtype=bool), mode, **kwargs)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [([[1.0] * 2, [0.5] * 6], 0.625), ([[4.0], [3.0] * 2, [2.0] * 3, [1.0] * 4], 2.0)],
)
def test_token_mean_does_not_depend_on_the_cut(losses: list[list[float]], expected: float) -> None:
    """AGG-01, AGG-03. One piece, one a sample, pieces with an empty one among them."""
    n = len(losses)
    weights = weights_of(losses)
    whole, gradient = step(losses, [list(range(n))], weights)
    assert whole == pytest.approx([expected])
    flat = np.array([x for row in losses for x in row])
    np.testing.assert_allclose(gradient, flat / len(flat), rtol=1e-12)
    for cut in ([[i] for i in range(n)], [list(range(n - 1)), [], [n - 1]]):
        parts, cut_gradient = step(losses, cut, weights)
        assert sum(parts) == pytest.approx(expected)
        np.testing.assert_allclose(cut_gradient, gradient, rtol=1e-12)


def test_ranks_hold_shares_that_are_summed() -> None:
    """AGG-02. One sequence a rank: 2/8 of loss 1 and 6/8 of loss 0.5; not divided by the ranks again."""
    losses = [[1.0] * 2, [0.5] * 6]
    assert step(losses, [[0], [1]], weights_of(losses))[0] == pytest.approx([0.25, 0.375])
    ones = [[1.0] * n for n in (1, 2, 3, 4)]
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert sum(step(ones, [[i] for i in range(4)], weights_of(ones, mode))[0]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "kwargs", "expected"),
    [
        ("token-mean", {}, (2 * 1.0 + 6 * 0.5) / 8),
        ("seq-mean-token-mean", {}, (1.0 + 0.5) / 2),
        ("seq-mean-token-sum", {}, (2.0 + 3.0) / 2),
        ("seq-mean-token-sum-norm", {"scale_factor": 10.0}, (2.0 + 3.0) / 2 / 10),
    ],
)
def test_each_mode_has_its_own_denominator(mode: str, kwargs: dict[str, float], expected: float) -> None:
    """Samples of 2 tokens of loss 1 and 6 of loss 0.5."""
    losses = [[1.0] * 2, [0.5] * 6]
    assert step(losses, [[0, 1]], weights_of(losses, mode, **kwargs))[0] == pytest.approx([expected])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("token-mean", 1.0), ("seq-mean-token-mean", 1.0), ("seq-mean-token-sum", 2.0)],
)
def test_samples_left_out_are_in_no_denominator(mode: Any, expected: float) -> None:
    """AGG-05. A truncated sample of 4 tokens is masked, a finished one of 2 has loss 1; faulty 1/3."""
    weights = token_weights(np.array([4, 2]), np.array([False, True]), mode)
    assert (weights[:4] == 0).all()
    assert step([[9.0] * 4, [1.0] * 2], [[0, 1]], weights)[0] == pytest.approx([expected])


def test_samples_of_zero_advantage_stay_in_the_denominator() -> None:
    """AGG-06. A group of equal rewards is trained on, with advantage 0: it halves the token mean here."""
    losses = [[1.0] * 3, [0.0] * 3]
    assert step(losses, [[0, 1]], weights_of(losses))[0] == pytest.approx([0.5])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_step_without_trained_tokens_has_weights_zero(mode: Any) -> None:
    """NUM-02. And a trained sample without tokens is no sample."""
    assert (token_weights(np.array([3, 2]), np.array([False, False]), mode) == 0).all()
    weights = token_weights(np.array([0, 2]), np.array([True, True]), mode)
    np.testing.assert_array_equal(weights, token_weights(np.array([2]), np.array([True]), mode))


def test_the_constant_of_the_norm_mode_is_required() -> None:
    with pytest.raises(ValueError, match="loss_scale_factor"):
        token_weights(np.array([1]), np.array([True]), "seq-mean-token-sum-norm")
