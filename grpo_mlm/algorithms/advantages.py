"""From rewards to advantages: how much better a sample is than the others of its prompt.

One function an estimator, all with the signature of `AdvantageEstimator`, in the registry `ADVANTAGES`.
Samples are grouped by prompt instance id, wherever they stand in the batch. An invalid sample has no part in
its group's statistics and no advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo_mlm.config.schema import AlgorithmConfig

STD_EPS = 1e-6  # added to a group's standard deviation


@dataclass(frozen=True)
class Advantages:
    """One advantage a sample, and which samples the loss and its denominators may count."""

    values: np.ndarray  # float64 [N], 0 where not trained
    trained: np.ndarray  # bool [N]: valid, and at least one other valid sample in the group
    metrics: dict[str, float]


AdvantageEstimator = Callable[[np.ndarray, np.ndarray, np.ndarray, AlgorithmConfig], Advantages]
"""(rewards float64 [N], group_id int64 [N], valid bool [N], config) -> Advantages."""


def grpo(rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray, config: AlgorithmConfig) -> Advantages:
    """`A_i = (r_i - mean_q) / (std_q + 1e-6)` over the valid samples of group q; sample std (ddof 1).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without `norm_adv_by_std_in_grpo` it is `dr_grpo`.
    A group whose valid rewards are all equal has advantage exactly 0 and stays in the loss's denominators.
    """
    groups = _groups(rewards, group_id, valid)
    scale = groups.std + STD_EPS if config.norm_adv_by_std_in_grpo else np.ones_like(groups.std)
    return _advantages(groups, groups.centred / scale[groups.of])


def dr_grpo(
    rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray, config: AlgorithmConfig
) -> Advantages:
    """`A_i = r_i - mean_q` over the valid samples of group q.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2: dividing by the std favours prompts
    that are too easy or too hard.
    """
    groups = _groups(rewards, group_id, valid)
    return _advantages(groups, groups.centred)


def equal_rewards(rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Samples of groups in which no two valid rewards differ, bool `[N]`."""
    groups = _groups(rewards, group_id, valid)
    return groups.equal[groups.of]


ADVANTAGES: dict[str, AdvantageEstimator] = {"grpo": grpo, "dr_grpo": dr_grpo}


@dataclass(frozen=True)
class _Groups:
    """What the valid rewards of G groups say."""

    of: np.ndarray  # int [N], sample -> group
    valid: np.ndarray  # bool [N]
    centred: np.ndarray  # float64 [N], reward - group mean; exactly 0 where invalid or all rewards are equal
    count: np.ndarray  # float64 [G], valid samples
    std: np.ndarray  # float64 [G], ddof 1; 0 below two valid samples
    equal: np.ndarray  # bool [G], no two valid rewards differ


def _groups(rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray) -> _Groups:
    valid = valid & np.isfinite(rewards)
    rewards = np.where(valid, rewards, 0.0)
    ids, of = np.unique(group_id, return_inverse=True)

    def total(values: np.ndarray) -> np.ndarray:
        return np.bincount(of, weights=values, minlength=len(ids))

    count = total(valid)
    mean = total(rewards) / np.maximum(count, 1)
    # Equal rewards leave a float residue in the mean, which a tiny std would blow up; min and max are exact.
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, of[valid], rewards[valid])
    np.maximum.at(high, of[valid], rewards[valid])
    equal = low >= high
    centred = np.where(valid & ~equal[of], rewards - mean[of], 0.0)
    std = np.sqrt(total(centred**2) / np.maximum(count - 1, 1))
    return _Groups(of, valid, centred, count, std, equal)


def _advantages(groups: _Groups, values: np.ndarray) -> Advantages:
    comparable = groups.count >= 2
    return Advantages(
        values=values,
        trained=groups.valid & comparable[groups.of],
        metrics={
            "groups/equal_rewards_fraction": float(
                (groups.equal & comparable).sum() / max(len(comparable), 1)
            ),
            "groups/too_few_valid": float((~comparable).sum()),
        },
    )
