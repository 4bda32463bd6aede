"""Advantages of a whole batch, and what its size asks of the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.algorithms.kl_control import KLController
from grpo_mlm.config.schema import Config
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.trainer.advantages import batch_advantages, charge_kl, correct_rollouts, scored
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


def config(reward: dict[str, Any] | None = None, **algorithm: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train_files": ["x.jsonl"], "train_batch_size": 2},
            "reward": {
                "functions": [{"name": "exact_match"}, {"name": "m:f", "weight": 0.5}],
                **(reward or {}),
            },
            "algorithm": algorithm,
        }
    )


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo"])
def test_equal_raw_rewards_give_exactly_zero_whatever_their_kl(estimator: str) -> None:
    """Design section 4: it is the raw rewards of a group that are asked, before any KL is taken off."""
    batch = scored_batch([1, 1, np.nan, 1, 0], [7, 7, 7, 3, 3])
    batch.old_logprobs = np.full(10, -1, dtype=np.float32)
    batch.ref_logprobs = np.array([-1, -1, -3, -1, -1, -1, -1, -1, -2, -2], dtype=np.float32)
    cfg = config(adv_estimator=estimator, use_kl_in_reward=True, kl_ctrl={"kl_coef": 0.1})
    metrics = charge_kl(batch, cfg.algorithm, KLController(cfg.algorithm.kl_ctrl))
    values, trained, group_metrics = batch_advantages(batch, cfg)
    assert not values[:6].any()
    assert trained.tolist() == [True, True, False, True, True]
    # Rewards 1 and 0 - 0.1 * 2: half a difference of 1.2 either way, or 1 / sqrt(2) standard deviations.
    expected = 0.6 if estimator == "dr_grpo" else 0.5**0.5
    np.testing.assert_allclose(values[6:], [expected, expected, -expected, -expected], rtol=1e-5)
    assert group_metrics["groups/equal_rewards_fraction"] == 0.5
    # k1 of the eight tokens of valid samples: 2 + 1 + 1.
    assert metrics["actor/reward_kl"] == pytest.approx(4 / 8)


def test_the_adaptive_weight_of_the_kl_is_that_of_the_next_step() -> None:
    batch = scored_batch([1.0, 0.0], [7, 7])
    batch.old_logprobs = np.full(4, -1, dtype=np.float32)
    batch.ref_logprobs = np.full(4, -1.5, dtype=np.float32)
    cfg = config(
        use_kl_in_reward=True,
        kl_ctrl={"type": "adaptive", "kl_coef": 0.1, "target_kl": 0.1, "horizon": 10},
    )
    controller = KLController(cfg.algorithm.kl_ctrl)
    metrics = charge_kl(batch, cfg.algorithm, controller)
    assert metrics == {"actor/reward_kl": pytest.approx(0.5), "actor/reward_kl_coef": 0.1}
    assert batch.reward.tolist() == pytest.approx([0.9, -0.1])
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))


def test_truncated_responses_vote_in_their_group_and_leave_the_loss() -> None:
    """AGG-05, ADV-14. Rewards 1, 0, 0 with the second cut short: advantages are those of all three."""
    batch = scored_batch([1.0, 0.0, 0.0], [7, 7, 7])
    batch.finish_reason = ["stop", "length", "stop"]
    values, trained, _ = batch_advantages(batch, config(adv_estimator="dr_grpo"))
    assert trained.all()
    masked = batch_advantages(batch, config(adv_estimator="dr_grpo", mask_truncated_completions=True))
    assert np.array_equal(masked[0], values)
    assert masked[1].tolist() == [True, False, True]
    weights = token_weights(batch.response_lens, masked[1], "token-mean")
    assert weights.tolist() == [0.25, 0.25, 0, 0, 0.25, 0.25]


def test_the_parts_that_gdpo_weighs_are_the_configs_rewards() -> None:
    cfg = config({"overlong_buffer": {"enable": True, "len": 2}})
    batch = scored_batch([1.0, 0.0], [7, 7])
    assert scored(batch, cfg).part_weights == {"exact_match": 1.0, "f": 0.5, "overlong": 1.0}
    assert scored(batch, config()).part_weights == {"exact_match": 1.0, "f": 0.5}


def test_decoupled_correction_is_made_once_before_the_step() -> None:
    """Ratios 4, 1 and 1, 1/4 of trainer to sampler; weights at most 2, the last token rejected."""
    batch = scored_batch([1.0, 0.0], [7, 7])
    batch.rollout_logprobs = np.full(4, -2, dtype=np.float32)
    batch.old_logprobs = batch.rollout_logprobs + np.log(np.float32([4, 1, 1, 0.25]))
    correction = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 5.0}
    rule = config(
        rollout_correction=correction | {"rollout_rs_threshold_lower": 0.5}
    ).algorithm.rollout_correction
    metrics = correct_rollouts(batch, rule)
    np.testing.assert_allclose(batch.is_weights, [2, 1, 1, 0.25], rtol=1e-6)
    assert batch.response_mask is not None
    assert batch.response_mask.tolist() == [True, True, True, False]
    assert metrics["rollout_corr/rs_kept_fraction"] == 0.75
    for off in ({}, {"mode": "bypass", "rollout_is": "token"}):
        other = scored_batch([1.0, 0.0], [7, 7])
        assert correct_rollouts(other, config(rollout_correction=off).algorithm.rollout_correction) == {}
        assert other.is_weights is None


class Scoring:
    """Stands for the trainer's processes: what they would say, and whether they were asked."""

    def __init__(self, batch: RolloutBatch) -> None:
        self.made = np.full(int(batch.response_lens.sum()), -3, dtype=np.float32)
        self.asked = False

    def logprobs(self, batch: RolloutBatch, which: str) -> tuple[np.ndarray, np.ndarray]:
        self.asked = True
        return self.made, self.made


@pytest.mark.parametrize(
    ("settings", "groups", "needed"),
    [
        ({}, 2, False),
        ({}, 4, True),  # a saved batch of more prompts than the configuration's
        ({"actor": {"ppo_mini_batch_size": 1}}, 2, True),
        ({"actor": {"ppo_epochs": 2}}, 2, True),
        ({"actor": {"policy_loss": {"loss_mode": "kl_cov"}}}, 2, True),
        ({"algorithm": {"rollout_correction": {"rollout_is": "token"}}}, 2, True),
        ({"algorithm": {"use_kl_in_reward": True}}, 2, True),
        ({"algorithm": {"rollout_correction": {"mode": "bypass"}}, "actor": {"ppo_epochs": 2}}, 2, False),
    ],
)
def test_old_logprobs_are_taken_first_unless_one_step_uses_the_whole_batch(
    settings: dict[str, Any], groups: int, needed: bool
) -> None:
    """LOSS-07: with more than one optimizer step, a later one's own forward is not the old policy. Bypass takes the
    sampler's."""
    batch = scored_batch([1.0, 0.0] * groups, sorted([*range(groups)] * 2))
    base = config().model_dump(mode="json")
    actor = Scoring(batch)
    run: Any = SimpleNamespace(config=Config.model_validate(base | settings), actor=actor)
    old = Run.old_logprobs(run, batch)
    assert actor.asked is needed
    if needed:
        assert old is actor.made
    else:
        bypass = run.config.algorithm.rollout_correction.mode == "bypass"
        assert old is (batch.rollout_logprobs if bypass else None)
