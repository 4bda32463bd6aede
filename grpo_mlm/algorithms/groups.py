"""Statistics of the samples of each prompt, whatever their order in the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Scored:
    """The scored samples of a step, `[N]` each. Samples are grouped by prompt instance, not by position."""

    rewards: np.ndarray  # float64; NaN where invalid
    group_id: np.ndarray  # int64, the prompt instance
    valid: np.ndarray  # bool
    response_lens: np.ndarray  # int64
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # component of the reward -> float64
    part_weights: Mapping[str, float] = field(default_factory=dict)  # its weight in the reward
    baseline: np.ndarray | None = None  # float64, reward of the prompt's greedy response


@dataclass(frozen=True)
class Groups:
    """What the valid values of G groups say; an invalid sample has no part in it."""

    of: np.ndarray  # int [N], sample -> group
    valid: np.ndarray  # bool [N]
    values: np.ndarray  # float64 [N], 0 where invalid
    centred: np.ndarray  # float64 [N], value - group mean; exactly 0 where invalid or all values are equal
    count: np.ndarray  # float64 [G], valid samples
    mean: np.ndarray  # float64 [G]
    std: np.ndarray  # float64 [G], ddof 1; 0 below two valid samples
    equal: np.ndarray  # bool [G], no two valid values differ

    @staticmethod
    def of_values(values: np.ndarray, group_id: np.ndarray, valid: np.ndarray) -> Groups:
        """Group the values `[N]`; those that are no finite numbers are invalid."""
        valid = valid & np.isfinite(values)
        values = np.where(valid, values, 0.0)
        ids, of = np.unique(group_id, return_inverse=True)
        count = np.bincount(of, weights=valid, minlength=len(ids))
        mean = np.bincount(of, weights=values, minlength=len(ids)) / np.maximum(count, 1)
        # Equal values leave a float residue in the mean, which a tiny std would blow up; min and max are exact.
        low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
        np.minimum.at(low, of[valid], values[valid])
        np.maximum.at(high, of[valid], values[valid])
        equal = low >= high
        centred = np.where(valid & ~equal[of], values - mean[of], 0.0)
        squares = np.bincount(of, weights=centred**2, minlength=len(ids))
        std = np.sqrt(squares / np.maximum(count - 1, 1))
        return Groups(of, valid, values, centred, count, mean, std, equal)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum over the valid samples of each group, `[N]` -> `[G]`."""
        return np.bincount(self.of, weights=np.where(self.valid, values, 0.0), minlength=len(self.count))


def equal_rewards(rewards: np.ndarray, group_id: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Samples of groups in which no two valid rewards differ, bool `[N]`."""
    groups = Groups.of_values(rewards, group_id, valid)
    return groups.equal[groups.of]
