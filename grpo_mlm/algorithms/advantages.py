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


def grpo(
    rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray, config: AlgorithmConfig
) -> Advantages:
    """`A_i = (r_i - mean_q) / (std_q + 1e-6)` over the valid samples of group q; sample std (ddof 1).

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without `norm_adv_by_std_in_grpo` it is `dr_grpo`.
    A group whose valid rewards are all equal has advantage exactly 0 and stays in the loss's denominators.
    """
    groups = _Groups(rewards, group_id, valid)
    scale = groups.std + STD_EPS if config.norm_adv_by_std_in_grpo else np.ones_like(groups.std)
    return groups.advantages(groups.centred / scale[groups.of])


def dr_grpo(
    rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray, config: AlgorithmConfig
) -> Advantages:
    """`A_i = r_i - mean_q` over the valid samples of group q.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2: dividing by the std favours prompts
    that are too easy or too hard.
    """
    groups = _Groups(rewards, group_id, valid)
    return groups.advantages(groups.centred)


ADVANTAGES: dict[str, AdvantageEstimator] = {"grpo": grpo, "dr_grpo": dr_grpo}


class _Groups:
    """Statistics of each group's valid rewards; `[G]` per group, `[N]` per sample."""

    def __init__(self, rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray) -> None:
        self.valid = valid & np.isfinite(rewards)
        rewards = np.where(self.valid, rewards, 0.0)
        ids, self.of = np.unique(group_id, return_inverse=True)  # [G], [N] sample -> group
        self.count = np.bincount(self.of, weights=self.valid, minlength=len(ids))
        mean = self._sum(rewards) / np.maximum(self.count, 1)
        # Equal rewards leave a float residue in the mean that a tiny std would blow up; equality is exact.
        low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
        np.minimum.at(low, self.of[self.valid], rewards[self.valid])
        np.maximum.at(high, self.of[self.valid], rewards[self.valid])
        self.equal = low >= high  # [G], also groups without a valid sample
        self.centred = np.where(self.valid & ~self.equal[self.of], rewards - mean[self.of], 0.0)
        self.std = np.sqrt(self._sum(self.centred**2) / np.maximum(self.count - 1, 1))

    def _sum(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.of, weights=values, minlength=len(self.count))

    def advantages(self, values: np.ndarray) -> Advantages:
        comparable = self.count >= 2
        total = max(len(self.count), 1)
        return Advantages(
            values=values,
            trained=self.valid & comparable[self.of],
            metrics={
                "groups/equal_rewards_fraction": float((self.equal & comparable).sum() / total),
                "groups/too_few_valid": float((~comparable).sum()),
            },
        )
