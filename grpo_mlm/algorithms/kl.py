"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html. With x sampled from the
policy and d = logp(x) - ref_logp(x):

| kind            | value               | d value / d logp  |                                            |
|-----------------|---------------------|-------------------|--------------------------------------------|
| k1, kl          | d                   | 1                 | unbiased value; gradient ignores the reference |
| abs             | abs(d)              | sign(d)           |                                            |
| k2, mse         | d^2 / 2             | d                 | gradient in expectation that of the true KL |
| k3, low_var_kl  | exp(-d) + d - 1     | 1 - exp(-d)       | unbiased, never negative, low variance     |

A `+` after the kind keeps its value and takes k2's gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # k3's exponent is clamped here: beyond, value finite and gradient 0


def _k1(d: Tensor) -> Tensor:
    return d


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    # The whole of d is clamped: clamping only the exponent would leave a gradient of the wrong sign.
    d = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.expm1(-d) + d


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": _k1,
    "kl": _k1,
    "abs": torch.abs,
    "k2": _k2,
    "mse": _k2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str) -> Tensor:
    """KL of each token, `[R]`, by the estimator `kind` of the table above; gradient into `logprobs`."""
    d = logprobs - ref_logprobs
    value = KL_ESTIMATORS[kind.removesuffix("+")](d)
    if not kind.endswith("+"):
        return value
    k2 = _k2(d)
    return value.detach() + (k2 - k2.detach())


def kl_in_reward(
    rewards: np.ndarray,
    logprobs: np.ndarray,
    ref_logprobs: np.ndarray,
    response_lens: np.ndarray,
    kind: str,
    coef: float,
) -> tuple[np.ndarray, float]:
    """`r_i - coef * sum_t KL_t` for every sample, float64 `[N]`, and the mean KL of a token of valid samples.

    InstructGPT (arXiv 2203.02155), equation 2. `logprobs`, `ref_logprobs` `[R]` flat in sample order,
    `response_lens` `[N]`. NaN rewards (invalid samples) stay NaN.
    """
    per_token = kl_penalty(
        torch.from_numpy(logprobs.astype(np.float64)),
        torch.from_numpy(ref_logprobs.astype(np.float64)),
        kind,
    ).numpy()
    sample = np.repeat(np.arange(len(rewards)), response_lens)
    kl = np.bincount(sample, weights=per_token, minlength=len(rewards))
    counted = per_token[np.isfinite(rewards)[sample]]
    return rewards - coef * kl, float(counted.mean()) if len(counted) else 0.0
