"""Which groups are kept, what long responses cost, and how the weight of the KL moves: by hand."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_mlm.algorithms.filters import groups_to_keep
from grpo_mlm.algorithms.groups import Scored
from grpo_mlm.algorithms.kl_control import KLController
from grpo_mlm.algorithms.overlong import overlong_penalty
from grpo_mlm.config.schema import FilterGroupsConfig, KLControlConfig
from grpo_mlm.errors import UserError

SCORED = Scored(
    # Groups: 7 all right, 3 mixed (mean 1/3), 5 equal but for an invalid one, 9 mixed (mean 0.75)
    rewards=np.array([1, 0, 1, 0, 0, 1, np.nan, 0, 1, 0.5]),
    group_id=np.array([7, 3, 7, 3, 5, 3, 5, 5, 9, 9]),
    valid=np.array([True] * 6 + [False] + [True] * 3),
    response_lens=np.ones(10, dtype=int),
    parts={"format": np.array([0, 0, 1, 0, 0, 0, 1, 0, 1, 1.0])},
)


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, {3, 9}),
        ({"mean_range": (0.0, 0.5)}, {3}),
        ({"mean_range": (0.75, 0.75)}, {9}),
        ({"mean_range": (0.76, 1.0)}, set()),
        ({"metric": "format"}, {7}),
    ],
)
def test_groups_that_tell_samples_apart_are_kept_whole(config: dict[str, object], kept: set[int]) -> None:
    mask = groups_to_keep(SCORED, FilterGroupsConfig(enable=True, **config))  # type: ignore[arg-type]
    assert set(SCORED.group_id[mask].tolist()) == kept
    assert mask.tolist() == [int(q) in kept for q in SCORED.group_id]


def test_an_unknown_metric_names_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"filter_groups.metric=acc: expected one of reward, format"):
        groups_to_keep(SCORED, FilterGroupsConfig(enable=True, metric="acc"))


def test_the_penalty_rises_over_the_buffer() -> None:
    """Limit 20, buffer 4: free up to 16 tokens."""
    lengths = np.array([0, 16, 17, 18, 20, 25])
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 4, 1.0), [0, 0, -0.25, -0.5, -1, -1])
    np.testing.assert_allclose(overlong_penalty(lengths, 20, 4, 0.5), [0, 0, -0.125, -0.25, -0.5, -0.5])


def test_the_adaptive_weight_follows_the_kl_within_its_clip() -> None:
    """Error 0.1 / 0.05 - 1 = 1, clipped to 0.2; then -0.1; 50 samples of a horizon of 500."""
    config = KLControlConfig(type="adaptive", kl_coef=0.2, target_kl=0.05, horizon=500)
    controller = KLController(config)
    controller.update(0.1, 50)
    assert controller.coef == pytest.approx(0.2 * (1 + 0.2 * 0.1))
    controller.update(0.045, 50)
    assert controller.coef == pytest.approx(0.2 * 1.02 * (1 - 0.1 * 0.1))
    controller.update(0.0, 50)
    assert controller.coef == pytest.approx(0.2 * 1.02 * 0.99 * (1 - 0.2 * 0.1))


def test_the_fixed_weight_stays() -> None:
    controller = KLController(KLControlConfig(kl_coef=0.2))
    controller.update(100.0, 1000)
    assert controller.coef == 0.2
