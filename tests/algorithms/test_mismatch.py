"""Trainer against sampler log-probs, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from grpo_mlm.algorithms.mismatch import rollout_mismatch


def test_differences_of_probabilities_and_log_probs() -> None:
    """ROL-02's numbers: softmax([2, 1, 0] / .5) gives logp -.142932, at temperature 1 -.407606: p .8668 and .6652."""
    rollout = np.array([-0.142932, -1.0], dtype=np.float32)
    trainer = np.array([-0.407606, -1.0], dtype=np.float32)
    out = rollout_mismatch(rollout, trainer, np.array([1, 1]))
    gap = math.exp(-0.142932) - math.exp(-0.407606)
    assert out["training/rollout_probs_diff_max"] == pytest.approx(gap, rel=1e-5)
    assert out["training/rollout_probs_diff_mean"] == pytest.approx(gap / 2, rel=1e-5)
    assert out["training/rollout_probs_diff_std"] == pytest.approx(gap / 2, rel=1e-5)
    assert out["rollout_corr/kl"] == pytest.approx(0.264674 / 2, rel=1e-5)
    assert out["rollout_corr/logprob_diff_max"] == pytest.approx(0.264674, rel=1e-5)


def test_tokens_that_the_trainer_did_not_score_are_left_out() -> None:
    """Three samples of 1, 1 and 0 tokens."""
    out = rollout_mismatch(np.array([-1.0, -9.0]), np.array([-1.0, np.nan]), np.array([1, 1, 0]))
    ones = {"rollout_corr/ess": 1.0, "rollout_corr/ppl_ratio": 1.0}
    assert out == dict.fromkeys(out, 0.0) | ones
    assert rollout_mismatch(np.array([-1.0]), np.array([np.nan]), np.array([1])) == {}


def test_estimates_over_tokens_and_over_samples() -> None:
    """Differences ln 2 and 0 in the first sample, -ln 2 in the second: weights 2, 1, 1/2."""
    d = np.array([math.log(2), 0.0, -math.log(2)])
    out = rollout_mismatch(np.full(3, -3.0), -3.0 + d, np.array([2, 1]))
    assert out["rollout_corr/ess"] == pytest.approx(3.5**2 / (3 * (4 + 1 + 0.25)))
    assert out["rollout_corr/k3_kl"] == pytest.approx(((2 - 1 - d[0]) + (0.5 - 1 - d[2])) / 3)
    assert out["rollout_corr/ppl_ratio"] == pytest.approx((2**-0.5 + 2) / 2)
