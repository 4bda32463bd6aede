"""Advantages of a whole batch, and what its size asks of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_mlm.config.schema import ActorConfig, AlgorithmConfig, KLControlConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.trainer.advantages import batch_advantages
from grpo_mlm.trainer.assemble import assemble
from grpo_mlm.trainer.run import Run
from tests.data.samples import finished


def scored_batch(rewards: list[float], groups: list[int]) -> RolloutBatch:
    """Samples of two response tokens each; NaN is an invalid one."""
    results = [RewardResult(r, invalid=bool(np.isnan(r))) for r in rewards]
    samples = [
        finished([1], [2, 3], group=group, result=result)
        for group, result in zip(groups, results, strict=True)
    ]
    return assemble(samples)


def kl_in_reward(estimator: str = "grpo") -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(
        {"adv_estimator": estimator, "use_kl_in_reward": True, "kl_ctrl": KLControlConfig(kl_coef=0.1)}
    )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_equal_raw_rewards_give_exactly_zero_whatever_their_kl(estimator: str) -> None:
    """Design section 4: it is the raw rewards of a group that are asked, before any KL is taken off."""
    batch = scored_batch([1, 1, np.nan, 1, 0], [7, 7, 7, 3, 3])
    batch.old_logprobs = np.full(10, -1, dtype=np.float32)
    batch.ref_logprobs = np.array([-1, -1, -3, -1, -1, -1, -1, -1, -2, -2], dtype=np.float32)
    values, trained, metrics = batch_advantages(batch, kl_in_reward(estimator))
    assert not values[:6].any()
    assert trained.tolist() == [True, True, False, True, True]
    # Rewards 1 and 0 - 0.1 * 2: half a difference of 1.2 either way, or 1 / sqrt(2) standard deviations.
    expected = 0.6 if estimator == "dr_grpo" else 0.5**0.5
    np.testing.assert_allclose(values[6:], [expected, expected, -expected, -expected], rtol=1e-5)
    assert metrics["groups/equal_rewards_fraction"] == 0.5
    # k1 of the eight tokens of valid samples: 2 + 1 + 1.
    assert metrics["actor/reward_kl"] == pytest.approx(4 / 8)


@pytest.mark.parametrize(
    ("actor", "groups", "needed"),
    [
        ({}, 2, False),
        ({}, 4, True),  # a saved batch of more prompts than the configuration's
        ({"ppo_mini_batch_size": 1}, 2, True),
        ({"ppo_epochs": 2}, 2, True),
    ],
)
def test_old_logprobs_are_taken_first_unless_one_step_uses_the_whole_batch(
    actor: dict[str, Any], groups: int, needed: bool
) -> None:
    """LOSS-07: with more than one optimizer step, a later one's own forward is not the old policy."""
    batch = scored_batch([1.0, 0.0] * groups, sorted([*range(groups)] * 2))
    config = SimpleNamespace(
        actor=ActorConfig(**actor),
        algorithm=AlgorithmConfig(),
        mini_batch_size=actor.get("ppo_mini_batch_size", 2),
    )
    assert Run.needs_old_logprobs(SimpleNamespace(config=config), batch) is needed
