"""Importance weights and rejections by hand; two samples of two tokens and one of one."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_mlm.algorithms.grpo_loss import needs_whole_samples, token_losses
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.algorithms.rollout_correction import correct, effective_sample_size
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig

SAMPLE = torch.tensor([0, 0, 3, 3, 4])
RATIOS = torch.tensor([4.0, 0.5, 0.25, 0.5, 1.0])
ROLLOUT = torch.full((5,), -3.0)
TRAINER = ROLLOUT + RATIOS.log()


def weights(**config: Any) -> list[float]:
    made = correct(TRAINER, ROLLOUT, SAMPLE, RolloutCorrectionConfig(**config))
    assert made.is_weights is not None
    assert made.keep.all()
    return made.is_weights.tolist()


@pytest.mark.parametrize(
    ("level", "raw"),
    [
        ("token", [4.0, 0.5, 0.25, 0.5, 1.0]),
        ("sequence", [2.0, 2.0, 0.125, 0.125, 1.0]),
        ("geometric", [2**0.5, 2**0.5, 8**-0.5, 8**-0.5, 1.0]),
    ],
)
def test_weights_of_each_level_truncated_and_masked(level: str, raw: list[float]) -> None:
    assert weights(rollout_is=level, rollout_is_threshold=100.0) == pytest.approx(raw)
    upper = weights(rollout_is=level, rollout_is_threshold=1.4)
    assert upper == pytest.approx([min(w, 1.4) for w in raw])
    both = {"rollout_is": level, "rollout_is_threshold": 1.4, "rollout_is_threshold_lower": 0.3}
    assert weights(**both) == pytest.approx([min(max(w, 0.3), 1.4) for w in raw])
    masked = weights(**both, rollout_is_mode="mask")
    assert masked == pytest.approx([w if 0.3 <= w <= 1.4 else 0.0 for w in raw])


def k3(ratio: float) -> float:
    return ratio - 1 - math.log(ratio)


@pytest.mark.parametrize(
    ("rule", "upper", "lower", "kept"),
    [
        ("token_k1", 2.5, None, [False, True, False, True, True]),  # ratios within 1/2.5 .. 2.5
        ("token_k1", 5.0, 0.3, [True, True, False, True, True]),
        ("token_k2", 0.5 * math.log(2) ** 2 + 1e-6, None, [False, True, False, True, True]),
        ("token_k3", k3(4.0) - 1e-6, None, [False, True, True, True, True]),
        ("seq_sum_k1", 3.0, None, [True, True, False, False, True]),  # ratios 2, 1/8, 1
        ("seq_mean_k1", 1.5, None, [True, True, False, False, True]),  # ratios sqrt 2, 1/sqrt 8, 1
        ("seq_mean_k3", (k3(4.0) + k3(0.5)) / 2 - 1e-6, None, [False, False, True, True, True]),
        ("seq_sum_k2", 1.22, None, [True, True, True, True, True]),
        ("seq_sum_k2", 1.19, None, [False, False, False, False, True]),
        ("seq_mean_k2", 0.61, None, [True, True, True, True, True]),
        ("seq_sum_k3", k3(0.25) + k3(0.5) - 1e-6, None, [False, False, False, False, True]),
    ],
)
def test_rejection(rule: Any, upper: float, lower: float | None, kept: list[bool]) -> None:
    config = RolloutCorrectionConfig(
        rollout_rs=rule, rollout_rs_threshold=upper, rollout_rs_threshold_lower=lower
    )
    made = correct(TRAINER, ROLLOUT, SAMPLE, config)
    assert made.keep.tolist() == kept
    assert made.is_weights is None
    assert made.metrics["rollout_corr/rs_kept_fraction"] == pytest.approx(sum(kept) / 5)


def test_log_probs_far_apart_stay_finite() -> None:
    far = torch.tensor([-200.0, 0.0, -200.0, 200.0, -1.0])
    for level in ("token", "sequence", "geometric"):
        for rule in ("token_k3", "seq_sum_k1"):
            config = RolloutCorrectionConfig(
                rollout_is=level, rollout_is_threshold=1e12, rollout_rs=rule, rollout_rs_threshold=2.0
            )
            made = correct(far, torch.zeros(5), SAMPLE, config)
            assert made.is_weights is not None
            assert made.is_weights.isfinite().all()
            assert all(math.isfinite(value) for value in made.metrics.values())


def test_effective_sample_size() -> None:
    assert effective_sample_size(torch.ones(7)) == pytest.approx(1.0)
    assert effective_sample_size(torch.tensor([1.0, 0, 0, 0])) == pytest.approx(0.25)
    assert effective_sample_size(torch.tensor([4.0, 2.0])) == pytest.approx(36 / 40)
    assert effective_sample_size(torch.zeros(3)) == 0.0


def test_bypass_corrects_inside_the_loss_with_the_weights_of_the_moment() -> None:
    """Old log-probs are the sampler's. Tokens 0 and 2 leave the whole loss, KL too; the others' policy term is weighed
    by min(ratio, 0.8), which has no gradient."""
    config = RolloutCorrectionConfig(
        mode="bypass",
        rollout_is="token",
        rollout_is_threshold=0.8,
        rollout_rs="token_k1",
        rollout_rs_threshold=2.5,
    )
    actor = ActorConfig(
        clip_ratio_high=10.0, clip_ratio_low=0.9, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k2"
    )
    logprobs = TRAINER.clone().requires_grad_()
    tokens = LossTokens(
        torch.ones(5), torch.full((5,), 0.2), SAMPLE, ROLLOUT, ref_logprobs=ROLLOUT, rollout_logprobs=ROLLOUT
    )
    values, report = token_losses(logprobs, torch.zeros(5), tokens, actor, config)
    kl = [0.1 * math.log(r) ** 2 / 2 for r in (4, 0.5, 0.25, 0.5, 1)]
    want = [0.0, 0.2 * (0.5 * -0.5 + kl[1]), 0.0, 0.2 * (0.5 * -0.5 + kl[3]), 0.2 * (0.8 * -1.0)]
    assert values.tolist() == pytest.approx(want, abs=1e-7)
    assert report["kept"].tolist() == [False, True, False, True, True]
    values.sum().backward()
    assert logprobs.grad is not None
    slope = [0.0, 0.2 * (-0.25 + 0.1 * math.log(0.5)), 0.0, 0.2 * (-0.25 + 0.1 * math.log(0.5)), -0.16]
    assert logprobs.grad.tolist() == pytest.approx(slope, abs=1e-6)


def test_which_losses_need_the_logits_twice() -> None:
    def needed(mode: str = "vanilla", **correction: Any) -> bool:
        actor = ActorConfig.model_validate({"policy_loss": {"loss_mode": mode}})
        return needs_whole_samples(actor, RolloutCorrectionConfig(**correction))

    assert not needed()
    assert not needed("cispo", rollout_is="sequence")  # decoupled: made before the step
    assert not needed(mode="vanilla", rollout_is="token")
    assert needed("gspo")
    assert needed("geo_mean")
    assert needed("my_module:my_loss")
    bypass = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": 2.0}
    assert needs_whole_samples(ActorConfig(), RolloutCorrectionConfig(mode="bypass", **bypass))  # type: ignore[arg-type]
    assert not needs_whole_samples(ActorConfig(), RolloutCorrectionConfig(mode="bypass", rollout_is="token"))
