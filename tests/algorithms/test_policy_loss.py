"""The clipped surrogate: values and gradients by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.algorithms.policy_loss import Report, vanilla
from grpo_mlm.config.schema import ActorConfig


def config(low: float = 0.2, high: float = 0.2, c: float | None = 3.0) -> ActorConfig:
    return ActorConfig(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)


def policy_loss(logp: Tensor, old: Tensor, advantages: Tensor, cfg: ActorConfig) -> tuple[Tensor, Report]:
    """Of tokens of one sample."""
    none = torch.zeros_like(advantages)
    return vanilla(logp, LossTokens(advantages, none, none.long(), old_logprobs=old), cfg)


def loss_and_slope(ratio: float, advantage: float, cfg: ActorConfig) -> tuple[float, float]:
    """Loss of one token, and its derivative by the ratio (that by the log-prob, over the ratio)."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, _ = policy_loss(
        logp, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), cfg
    )
    loss.sum().backward()
    assert logp.grad is not None
    return loss.item(), logp.grad.item() / ratio


@pytest.mark.parametrize(
    ("ratio", "advantage", "c", "loss", "slope"),
    [
        (0.5, 1.0, None, -0.5, -1),
        (0.5, -1.0, None, 0.8, 0),
        (1.3, 1.0, None, -1.28, 0),
        (1.3, -1.0, None, 1.3, 1),
        (5.0, 1.0, None, -1.28, 0),
        (5.0, -1.0, None, 5.0, 1),
        (5.0, 1.0, 3.0, -1.28, 0),
        (5.0, -1.0, 3.0, 3.0, 0),
        (2.9, -1.0, 3.0, 2.9, 1),
        (0.5, -2.0, 3.0, 1.6, 0),
        (1.0, -2.0, 3.0, 2.0, 2),
        (1.0, 0.0, 3.0, 0.0, 0),
    ],
)
def test_clip_works_on_the_right_side(
    ratio: float, advantage: float, c: float | None, loss: float, slope: float
) -> None:
    """LOSS-01. Clip 0.2 below, 0.28 above."""
    got = loss_and_slope(ratio, advantage, config(0.2, 0.28, c))
    assert got == pytest.approx((loss, slope), abs=1e-9)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "cfg"),
    [
        (1.0, 1.0, config(0.2, math.e - 1)),  # 1 + high is exactly e
        (0.0, -1.0, config(0.0, 0.2)),  # 1 - low is exactly 1
        (0.0, 1.0, config(0.2, 0.0)),
        (1.0, -1.0, config(0.2, 0.2, math.e)),  # dual clip
    ],
)
def test_exactly_at_a_bound_the_whole_gradient_passes(
    log_ratio: float, advantage: float, cfg: ActorConfig
) -> None:
    """Neither 0 nor half of it, and the token does not count as clipped."""
    logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    loss, parts = policy_loss(
        logp, torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64), cfg
    )
    loss.sum().backward()
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-advantage * math.exp(log_ratio), rel=1e-12)
    assert not parts["clipped"].item()
    assert not parts["clipped_lower"].item()


def test_the_ratio_is_one_of_tokens_not_of_sequences() -> None:
    """LOSS-02. Token ratios 1.1, 0.9, 1.5: mean of -1.1, -0.9, -1.2. Sequence ratios would give -1.2 or -1.140886."""
    ratios = torch.tensor([1.1, 0.9, 1.5], dtype=torch.float64)
    loss, _ = policy_loss(
        ratios.log(), torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64), config()
    )
    assert loss.mean().item() == pytest.approx(-1.066667, abs=1e-6)


def test_a_token_counts_as_clipped_only_on_the_side_that_clips() -> None:
    """MET-01. Ratios 1.5, 1.5, 1.5, 1.0 with advantages +, +, -, +: half."""
    logp = torch.tensor([1.5, 1.5, 1.5, 1.0]).log()
    _, parts = policy_loss(logp, torch.zeros(4), torch.tensor([1.0, 1.0, -1.0, 1.0]), config())
    assert parts["clipped"].tolist() == [True, True, False, False]
    assert not parts["clipped_lower"].any()


def test_the_lower_clip_counts_negative_advantages_past_the_dual_bound() -> None:
    logp = torch.tensor([4.0, 4.0, 2.0]).log()
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    _, parts = policy_loss(logp, torch.zeros(3), advantages, config(c=3.0))
    assert parts["clipped_lower"].tolist() == [True, False, False]
    _, off = policy_loss(logp, torch.zeros(3), advantages, config(c=None))
    assert not off["clipped_lower"].any()


def test_ppo_kl_is_old_minus_new_and_carries_no_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    _, parts = policy_loss(logp, torch.tensor([-1.5, -1.0]), torch.ones(2), config())
    assert parts["ppo_kl"].tolist() == [-0.5, 1.0]
    assert not any(values.requires_grad for values in parts.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_give_finite_losses_and_gradients(advantage: float) -> None:
    logp = torch.tensor([500.0, -500.0], requires_grad=True)
    loss, _ = policy_loss(logp, torch.zeros(2), torch.full((2,), advantage), config(c=None))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()
