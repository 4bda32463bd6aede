"""From the batch's rewards to one advantage a response token, and to what of the batch the loss may use."""

from __future__ import annotations

import numpy as np
import torch

from grpo_mlm.algorithms.advantages import estimate_advantages
from grpo_mlm.algorithms.groups import Scored, equal_rewards
from grpo_mlm.algorithms.kl import kl_in_reward
from grpo_mlm.algorithms.kl_control import KLController
from grpo_mlm.algorithms.rollout_correction import correct
from grpo_mlm.config.schema import AlgorithmConfig, Config, RolloutCorrectionConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.rewards.registry import short_names
from grpo_mlm.telemetry.batch_metrics import spread


def scored(batch: RolloutBatch, config: Config) -> Scored:
    """What estimators and filters see of the batch."""
    functions = config.reward.functions
    weights = dict(zip(short_names(functions), (f.weight for f in functions), strict=True))
    if config.reward.overlong_buffer.enable:
        weights["overlong"] = 1.0
    return Scored(
        rewards=batch.reward,
        group_id=batch.group_id,
        valid=batch.valid,
        response_lens=batch.response_lens,
        parts=batch.reward_parts,
        part_weights=weights,
        baseline=batch.baseline,
    )


def charge_kl(batch: RolloutBatch, algorithm: AlgorithmConfig, controller: KLController) -> dict[str, float]:
    """With `use_kl_in_reward`, take the KL to the reference off each sample's reward, and steer its weight.

    Not in groups whose rewards are all equal: divided by the group's std, differences in KL alone would weigh as much
    as a right answer.
    """
    if not algorithm.use_kl_in_reward:
        return {}
    assert batch.old_logprobs is not None
    assert batch.ref_logprobs is not None
    coef = controller.coef
    charged, kl = kl_in_reward(
        batch.reward, batch.old_logprobs, batch.ref_logprobs, batch.response_lens, algorithm.kl_penalty, coef
    )
    batch.reward = np.where(equal_rewards(batch.reward, batch.group_id, batch.valid), batch.reward, charged)
    controller.update(kl, len(batch))
    return {"actor/reward_kl": kl, "actor/reward_kl_coef": coef}


def batch_advantages(batch: RolloutBatch, config: Config) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Advantages `[R]` float32, which samples are trained on `[N]` bool, and metrics."""
    algorithm = config.algorithm
    estimate = estimate_advantages(scored(batch, config), algorithm)
    trained = estimate.trained
    if algorithm.mask_truncated_completions:
        trained = trained & (np.array(batch.finish_reason) != "length")
    metrics = estimate.metrics | spread("critic/advantages", estimate.values[trained])
    return np.repeat(estimate.values, batch.response_lens).astype(np.float32), trained, metrics


def correct_rollouts(batch: RolloutBatch, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Decoupled rollout correction: importance weights and rejections from sampler and trainer before the step."""
    if config.mode == "bypass" or (config.rollout_is is None and config.rollout_rs is None):
        return {}
    assert batch.old_logprobs is not None
    result = correct(
        torch.from_numpy(batch.old_logprobs),
        torch.from_numpy(batch.rollout_logprobs),
        torch.from_numpy(np.repeat(np.arange(len(batch)), batch.response_lens)),
        config,
    )
    batch.is_weights = None if result.is_weights is None else result.is_weights.numpy()
    batch.response_mask = result.keep.numpy()
    return result.metrics
