"""From the batch's rewards to one advantage a response token."""

from __future__ import annotations

import numpy as np

from grpo_mlm.algorithms.advantages import ADVANTAGES, equal_rewards
from grpo_mlm.algorithms.kl import kl_in_reward
from grpo_mlm.config.schema import AlgorithmConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.telemetry.batch_metrics import spread


def batch_advantages(
    batch: RolloutBatch, algorithm: AlgorithmConfig
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Advantages `[R]` float32, which samples are trained on `[N]` bool, and metrics.

    With `use_kl_in_reward` the KL to the reference is taken off each sample's reward first, but not in groups whose
    rewards are all equal: divided by the group's std, differences in KL alone would weigh as much as a right answer.
    """
    rewards, metrics = batch.reward, {}
    if algorithm.use_kl_in_reward:
        assert batch.old_logprobs is not None
        assert batch.ref_logprobs is not None
        charged, kl = kl_in_reward(
            rewards,
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.response_lens,
            algorithm.kl_penalty,
            algorithm.kl_ctrl.kl_coef,
        )
        rewards = np.where(equal_rewards(rewards, batch.group_id, batch.valid), rewards, charged)
        metrics["actor/reward_kl"] = kl
    estimate = ADVANTAGES[algorithm.adv_estimator](rewards, batch.group_id, batch.valid, algorithm)
    metrics |= estimate.metrics | spread("critic/advantages", estimate.values[estimate.trained])
    return np.repeat(estimate.values, batch.response_lens).astype(np.float32), estimate.trained, metrics
