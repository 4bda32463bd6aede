"""KL estimators: values and slopes by hand, gradients against float64 finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from grpo_mlm.algorithms.kl import KL_ESTIMATORS, kl_in_reward, kl_penalty

ALL_KINDS = [kind + plus for kind in KL_ESTIMATORS for plus in ("", "+")]


def value_and_slope(kind: str, logp: float, ref: float) -> tuple[float, float]:
    x = torch.tensor([logp], dtype=torch.float64, requires_grad=True)
    value = kl_penalty(x, torch.tensor([ref], dtype=torch.float64), kind)
    value.sum().backward()
    assert x.grad is not None
    return value.item(), x.grad.item()


@pytest.mark.parametrize(
    ("kind", "above", "below"),
    [
        ("k1", (0.5, 1.0), (-0.5, 1.0)),
        ("kl", (0.5, 1.0), (-0.5, 1.0)),
        ("abs", (0.5, 1.0), (0.5, -1.0)),
        ("k2", (0.125, 0.5), (0.125, -0.5)),
        ("mse", (0.125, 0.5), (0.125, -0.5)),
        ("k3", (0.106531, 0.393469), (0.148721, -0.648721)),
        ("low_var_kl", (0.106531, 0.393469), (0.148721, -0.648721)),
    ],
)
def test_values_and_slopes_on_both_sides_of_the_reference(
    kind: str, above: tuple[float, float], below: tuple[float, float]
) -> None:
    """KL-01. logp -1.0 against -1.5, and the other way round."""
    assert value_and_slope(kind, -1.0, -1.5) == pytest.approx(above, abs=1e-6)
    assert value_and_slope(kind, -1.5, -1.0) == pytest.approx(below, abs=1e-6)


@pytest.mark.parametrize("kind", list(KL_ESTIMATORS))
@pytest.mark.parametrize(("logp", "ref"), [(-1.0, -1.5), (-1.5, -1.0), (-0.3, -4.0), (-2.0, -2.0)])
def test_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str, logp: float, ref: float) -> None:
    """KL-02. So that k1+ pulls towards the reference, which k1 does not."""
    value, slope = value_and_slope(kind + "+", logp, ref)
    assert value == value_and_slope(kind, logp, ref)[0]
    assert slope == pytest.approx(logp - ref, abs=1e-12)


def test_plain_k1_ignores_the_reference_in_its_gradient_and_the_others_do_not() -> None:
    """KL-02: the reason why the configuration refuses k1 in the loss."""
    moved = {k: value_and_slope(k, -1.0, -1.5)[1] != value_and_slope(k, -1.0, 1.5)[1] for k in ALL_KINDS}
    assert {k for k, changes in moved.items() if not changes} == {"k1", "kl"}


def test_a_descent_step_moves_towards_the_reference() -> None:
    """KL-01. Two tokens, policy [.7, .3], reference [.4, .6]: the expected gradient lowers the true KL."""
    ref = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
    for kind in ("k2", "k3", "k1+", "abs+"):
        logits = torch.tensor([0.7, 0.3], dtype=torch.float64).log().requires_grad_()
        logp = logits.log_softmax(0)
        loss = (logp.exp().detach() * kl_penalty(logp, ref, kind)).sum()
        loss.backward()
        assert logits.grad is not None
        after = (logits.detach() - 0.1 * logits.grad).log_softmax(0)
        assert (after.exp() * (after - ref)).sum() < (logp.exp() * (logp - ref)).sum().detach()


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("gap", [-800.0, -25.0, 25.0, 800.0])
def test_far_apart_log_probs_stay_finite_and_never_push_away(kind: str, gap: float) -> None:
    value, slope = value_and_slope(kind, -400.0, -400.0 - gap)
    assert math.isfinite(value)
    assert math.isfinite(slope)
    if kind not in ("k1", "kl"):
        assert slope * gap >= 0


def test_small_differences_keep_their_digits_in_fp32() -> None:
    d = torch.tensor([1e-3], dtype=torch.float32)
    expected = math.exp(-float(d)) - 1 + float(d)
    assert kl_penalty(d, torch.zeros(1), "k3").item() == pytest.approx(expected, rel=2e-3)


def test_kl_in_reward_takes_each_samples_own_tokens() -> None:
    """KL-03. Samples of 2, 0 and 1 tokens; k1 sums .1 + .3, nothing, and 5; NaN stays NaN and out of the mean."""
    logp = np.array([-1.0, -1.0, -2.0], dtype=np.float32)
    ref = np.array([-1.1, -1.3, -7.0], dtype=np.float32)
    rewards = np.array([1.0, 0.5, np.nan])
    out, mean = kl_in_reward(rewards, logp, ref, np.array([2, 0, 1]), "k1", 0.5)
    np.testing.assert_allclose(out, [0.8, 0.5, np.nan], rtol=1e-6)
    assert mean == pytest.approx(0.2, rel=1e-6)
    ref[2] = np.nan
    assert kl_in_reward(rewards, logp, ref, np.array([2, 0, 1]), "k1", 0.5)[1] == mean
    assert np.array_equal(rewards, [1.0, 0.5, np.nan], equal_nan=True)


def test_a_positive_kl_lowers_the_reward() -> None:
    logp, ref = np.array([-1.0]), np.array([-1.5])
    assert kl_in_reward(np.array([0.0]), logp, ref, np.array([1]), "k3", 1.0)[0][0] == pytest.approx(
        -0.106531, abs=1e-6
    )
