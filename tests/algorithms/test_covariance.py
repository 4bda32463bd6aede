"""The tokens that covariance losses treat apart."""

from __future__ import annotations

import numpy as np

from grpo_mlm.algorithms.covariance import select_tokens
from grpo_mlm.config.schema import PolicyLossConfig

# Means over the trained four: log-prob -2.5, advantage 0; covariances 1.5, 0.5, 0.5, 1.5 by hand.
LOGPROBS = np.array([-1.0, -9.0, -2.0, -3.0, -4.0])
ADVANTAGES = np.array([1.0, 50.0, 1.0, -1.0, -1.0])
TRAINED = np.array([True, False, True, True, True])


def select(seed: int = 0, **config: object) -> list[int]:
    loss = PolicyLossConfig(**config)  # type: ignore[arg-type]
    return np.flatnonzero(
        select_tokens(LOGPROBS, ADVANTAGES, TRAINED, loss, np.random.default_rng(seed))
    ).tolist()


def test_kl_cov_takes_the_greatest() -> None:
    assert select(loss_mode="kl_cov", kl_cov_ratio=0.5) == [0, 4]
    assert select(loss_mode="kl_cov", kl_cov_ratio=0.75) == [0, 2, 4]
    assert select(loss_mode="kl_cov", kl_cov_ratio=1e-4) == [0]  # one at least


def test_clip_cov_draws_among_those_between_its_bounds() -> None:
    drawn = {tuple(select(seed, loss_mode="clip_cov", clip_cov_ratio=0.25)) for seed in range(40)}
    assert drawn == {(0,), (4,)}
    assert select(loss_mode="clip_cov", clip_cov_ratio=1.0) == [0, 4]
    assert select(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.0, clip_cov_ub=1.0) == [2, 3]
    assert select(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=2.0) == []


def test_no_trained_token_is_no_token() -> None:
    none = np.zeros(5, dtype=bool)
    config = PolicyLossConfig(loss_mode="kl_cov")
    assert not select_tokens(LOGPROBS, ADVANTAGES, none, config, np.random.default_rng(0)).any()
