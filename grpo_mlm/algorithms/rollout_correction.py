"""Sampler and trainer disagree a little on the log-prob of the same token under the same weights. Importance weights
make the gradient that of the trainer's policy; rejection leaves out what has drifted too far.

With d = trainer - rollout log-prob of a token, clamped to -20..20:

| level      | importance weight of a token             |
|------------|------------------------------------------|
| token      | exp(d)                                   |
| sequence   | exp(sum of its sample's d)               |
| geometric  | exp(mean of its sample's d)              |

`truncate` bounds the weight (truncated importance sampling: Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training"), `mask` makes one outside of the thresholds 0 (IcePop, arXiv 2510.18855; masked
importance sampling: Liu, Li et al. 2025, "When Speed Kills Stability"). Weights carry no gradient.

Rejection looks at k1 = d, k2 = d^2 / 2 or k3 = exp(d) - 1 - d (Schulman 2020) of a token, or at their sum or mean over
its sample. For k1 the thresholds bound exp of it, a ratio: `lower <= exp(k1) <= upper`, lower being 1 / upper unless
given. For k2 and k3, which are never negative, `value <= upper`. A rejected token has weight 0 in the whole loss and
stays in its denominators.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mlm.algorithms.per_sample import sample_mean, sample_sum
from grpo_mlm.config.schema import RolloutCorrectionConfig

LOG_RATIO_BOUND = 20.0


@dataclass(frozen=True)
class Correction:
    """Of each token `[R]`."""

    is_weights: Tensor | None  # float32, multiplies the policy term; None: no importance sampling
    keep: Tensor  # bool, False where rejected
    metrics: dict[str, float]


@torch.no_grad()
def correct(
    logprobs: Tensor, rollout_logprobs: Tensor, sample: Tensor, config: RolloutCorrectionConfig
) -> Correction:
    """Importance weights and rejections. `logprobs`, `rollout_logprobs` float32 `[R]`, the trainer's and the sampler's;
    `sample` int64 `[R]`, which sample a token belongs to; its tokens stand together."""
    d = (logprobs - rollout_logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    keep = torch.ones_like(d, dtype=torch.bool)
    if config.rollout_rs is not None:
        keep = _keep(d, sample, config)
    if config.rollout_is is None:
        return Correction(None, keep, {"rollout_corr/rs_kept_fraction": _mean(keep)})
    raw = _over(d, sample, {"token": "token", "sequence": "sum", "geometric": "mean"}[config.rollout_is])
    raw = raw.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    lower, upper = config.rollout_is_threshold_lower or 0.0, config.rollout_is_threshold
    inside = (raw >= lower) & (raw <= upper)
    weights = raw.clamp(lower, upper) if config.rollout_is_mode == "truncate" else raw * inside
    metrics = {
        "rollout_corr/rs_kept_fraction": _mean(keep),
        "rollout_corr/is_mean": _mean(weights),
        "rollout_corr/is_outside_fraction": 1 - _mean(inside),
        "rollout_corr/is_ess": effective_sample_size(weights),
    }
    return Correction(weights, keep, metrics)


def effective_sample_size(weights: Tensor) -> float:
    """(sum w)^2 / (N sum w^2), in 1/N..1: the share of N samples that a weighted mean is worth (Kong 1992)."""
    w = weights.double()
    total = len(w) * w.square().sum().item()
    return w.sum().item() ** 2 / total if total else 0.0


def _keep(d: Tensor, sample: Tensor, config: RolloutCorrectionConfig) -> Tensor:
    assert config.rollout_rs is not None
    assert config.rollout_rs_threshold is not None
    *level, kind = config.rollout_rs.split("_")
    estimates = {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(d) - d}
    value = _over(estimates[kind], sample, level[-1])
    upper = config.rollout_rs_threshold
    if kind != "k1":
        return value <= upper
    ratio = value.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return (ratio >= (config.rollout_rs_threshold_lower or 1 / upper)) & (ratio <= upper)


def _over(values: Tensor, sample: Tensor, level: str) -> Tensor:
    """At each token its own value, or the sum or mean of its sample's."""
    if level == "token":
        return values
    return sample_mean(values, sample) if level == "mean" else sample_sum(values, sample)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
