"""Advantages against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_mlm.algorithms.advantages import Advantages, estimate_advantages
from grpo_mlm.algorithms.groups import Scored
from grpo_mlm.config.schema import AlgorithmConfig

NAN = float("nan")


def estimate(
    rewards: list[float],
    groups: list[int] | None = None,
    valid: list[bool] | None = None,
    name: str = "grpo",
    by_std: bool = True,
    lens: list[int] | None = None,
    baseline: list[float] | None = None,
) -> Advantages:
    r = np.array(rewards, dtype=np.float64)
    scored = Scored(
        rewards=r,
        group_id=np.array(groups if groups is not None else [0] * len(r)),
        valid=np.array(valid) if valid is not None else np.isfinite(r),
        response_lens=np.array(lens if lens is not None else [1] * len(r)),
        parts={"reward": r},
        part_weights={"reward": 1.0},
        baseline=None if baseline is None else np.array(baseline, dtype=np.float64),
    )
    return estimate_advantages(scored, AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=by_std))


def test_groups_are_prompt_instances_wherever_their_samples_stand() -> None:
    """ADV-01. P1, P2, P1, P2 with rewards 1, 1, 0, 1; sample std of {1, 0} is 1/sqrt(2)."""
    groups = [7, 3, 7, 3]
    np.testing.assert_allclose(estimate([1, 1, 0, 1], groups, name="dr_grpo").values, [0.5, 0, -0.5, 0])
    np.testing.assert_allclose(
        estimate([1, 1, 0, 1], groups).values, [0.70711, 0, -0.70711, 0], rtol=0, atol=1e-5
    )


def test_permuting_samples_permutes_advantages() -> None:
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=24), np.repeat(np.arange(6), 4)
    order = rng.permutation(24)
    straight = estimate(list(rewards), list(groups)).values
    shuffled = estimate(list(rewards[order]), list(groups[order])).values
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-12)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_a_group_of_one_has_advantage_zero_and_is_not_trained(name: str) -> None:
    """ADV-03. The reward itself must not come through as the advantage."""
    out = estimate([5.0, 1.0, 0.0], [0, 1, 1], name=name)
    assert out.values[0] == 0
    assert out.trained.tolist() == [False, True, True]
    assert out.metrics["groups/too_few_valid"] == 1


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@pytest.mark.parametrize(("reward", "n"), [(0.35, 8), (0.95, 8), (0.1, 7), (0.3 * 3, 11)])
def test_equal_rewards_have_advantage_exactly_zero(name: str, reward: float, n: int) -> None:
    """ADV-04. Also from fp32 rewards, whose mean leaves a residue."""
    for value in (reward, float(np.float32(reward))):
        out = estimate([value] * n, name=name)
        assert (out.values == 0).all()
        assert out.trained.all()
        assert out.metrics["groups/equal_rewards_fraction"] == 1


def test_one_low_reward_among_high_ones_keeps_its_size() -> None:
    """ADV-04, second set: 0 and seven times 0.95, whose mean is 0.83125."""
    np.testing.assert_allclose(
        estimate([0.0] + [0.95] * 7, name="dr_grpo").values, [-0.83125] + [0.11875] * 7
    )


def test_invalid_samples_have_no_vote() -> None:
    """ADV-05. Rewards 1, (1), 0, 0: mean 1/3, sample std 0.57735."""
    valid = [True, False, True, True]
    centred = estimate([1, 1, 0, 0], valid=valid, name="dr_grpo")
    np.testing.assert_allclose(centred.values, [2 / 3, 0, -1 / 3, -1 / 3])
    assert centred.trained.tolist() == valid
    scaled = estimate([1, 1, 0, 0], valid=valid)
    np.testing.assert_allclose(scaled.values, [1.1547, 0, -0.57735, -0.57735], rtol=0, atol=1e-5)


def test_a_batch_without_valid_samples_trains_nothing() -> None:
    """ADV-05, last part."""
    out = estimate([NAN] * 4, [0, 0, 1, 1])
    assert (out.values == 0).all()
    assert not out.trained.any()
    assert out.metrics["groups/too_few_valid"] == 2
    assert out.metrics["groups/equal_rewards_fraction"] == 0


def test_nan_rewards_stay_out_of_their_group_and_of_others() -> None:
    """ADV-06. Even when the valid flag forgot about them."""
    for valid in (None, [True] * 14):
        rewards = [1, 0, NAN, 1] + [NAN] * 7 + [1] + [1, 0]
        out = estimate(rewards, [0] * 4 + [1] * 8 + [2] * 2, valid)
        np.testing.assert_allclose(out.values[:4], [0.57735, -1.1547, 0, 0.57735], rtol=0, atol=1e-5)
        assert (out.values[4:12] == 0).all()
        assert not out.trained[4:12].any()
        np.testing.assert_allclose(out.values[12:], [0.70711, -0.70711], rtol=0, atol=1e-5)
        assert not out.trained[2]


def test_std_is_the_sample_std_with_eps_1e_minus_6() -> None:
    """ADV-08. Rewards 1, 0, 0, 0: sample std 0.5; ddof 0 would give 1.7320."""
    values = estimate([1, 0, 0, 0]).values
    np.testing.assert_allclose(values, np.array([0.75, -0.25, -0.25, -0.25]) / (0.5 + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(values, [1.5, -0.5, -0.5, -0.5], rtol=0, atol=1e-5)


def test_advantages_are_not_normalised_over_the_batch() -> None:
    """ADV-09. Group 0 has std 0, group 1 {1, 0}: batch std is that of [0, 0, .7071, -.7071], not 1."""
    values = estimate([1, 1, 1, 0], [0, 0, 1, 1]).values
    np.testing.assert_allclose(values.std(ddof=1), np.sqrt(1 / 3), rtol=0, atol=1e-5)
    tenfold = estimate([10, 10, 10, 0], [0, 0, 1, 1], name="dr_grpo").values
    np.testing.assert_allclose(tenfold, [0, 0, 5, -5])


def test_without_std_grpo_is_dr_grpo() -> None:
    rewards, groups = [0.2, 0.9, 0.4, 1.0, 0.0], [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(
        estimate(rewards, groups, by_std=False).values, estimate(rewards, groups, name="dr_grpo").values
    )


def test_dropped_samples_leave_the_others_with_their_own_advantages() -> None:
    """ADV-14. Two prompts of four, two of the first dropped: the true surviving groups decide."""
    rewards = [1, 0, 1, 0, 1, 0, 0, 0]
    groups = [0, 0, 0, 0, 1, 1, 1, 1]
    valid = [False, True, True, False, True, True, True, True]
    out = estimate(rewards, groups, valid, name="dr_grpo")
    np.testing.assert_allclose(out.values, [0, -0.5, 0.5, 0, 0.75, -0.25, -0.25, -0.25])
    assert out.trained.tolist() == valid


def test_an_empty_batch_gives_nothing() -> None:
    out = estimate([])
    assert len(out.values) == len(out.trained) == 0
