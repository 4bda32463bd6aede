"""Which groups of samples have something to teach."""

from __future__ import annotations

import numpy as np

from grpo_mlm.algorithms.groups import Groups, Scored
from grpo_mlm.config.schema import FilterGroupsConfig
from grpo_mlm.errors import UserError


def groups_to_keep(scored: Scored, config: FilterGroupsConfig) -> np.ndarray:
    """Samples of groups in which `metric` differs between valid samples, and whose mean of it lies in `mean_range`
    (ends included); bool `[N]`.

    DAPO (arXiv 2503.14476), equation 11: a prompt that is always or never solved has no gradient. UserError where
    there is no such metric.
    """
    values = scored.rewards
    if config.metric != "reward":
        if config.metric not in scored.parts:
            known = ", ".join(["reward", *scored.parts])
            raise UserError(f"algorithm.filter_groups.metric={config.metric}: expected one of {known}")
        values = scored.parts[config.metric]
    groups = Groups.of_values(values, scored.group_id, scored.valid)
    kept = ~groups.equal
    if config.mean_range is not None:
        low, high = config.mean_range
        kept &= (groups.mean >= low) & (groups.mean <= high)
    return kept[groups.of]
