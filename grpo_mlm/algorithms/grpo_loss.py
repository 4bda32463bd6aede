"""The loss that GRPO descends, on the tokens of one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mlm.algorithms.kl import kl_penalty
from grpo_mlm.algorithms.policy_loss import policy_loss
from grpo_mlm.config.schema import ActorConfig

Metrics = dict[str, tuple[float, float]]
"""Name -> (numerator, denominator). Over micro-batches and ranks both are summed, then divided; a denominator of 0
marks a total. Of names that end in `_max` the greatest numerator is taken, of `_min` the least."""


def loss_and_metrics(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    config: ActorConfig,
) -> tuple[Tensor, Metrics]:
    """loss = sum_t w_t (L_policy,t + kl_loss_coef KL_t - entropy_coeff H_t), arXiv 2402.03300, equation 3.

    All tensors are float32 `[R]`, one value a response token. `weights` come from `aggregate.token_weights` and hold
    the denominators of the whole optimizer step: losses and gradients are summed over micro-batches and ranks.
    Tokens of weight 0 leave before any arithmetic, so nothing in their cells can reach loss, gradient or metrics.
    Without `old_logprobs` this forward is the old policy: the ratio is 1, its gradient that of the log-prob.
    """
    kept = weights > 0
    logprobs, entropy, advantages, weights = (x[kept] for x in (logprobs, entropy, advantages, weights))
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs[kept]
    per_token, policy = policy_loss(logprobs, old_logprobs, advantages, config)
    totals = {"pg_loss": weights * per_token}
    means = {
        "pg_clipfrac": policy["clipped"],
        "pg_clipfrac_lower": policy["clipped_lower"],
        "ppo_kl": policy["ppo_kl"],
        "entropy": entropy,
    }
    if config.use_kl_loss:
        assert ref_logprobs is not None
        kl = kl_penalty(logprobs, ref_logprobs[kept], config.kl_loss_type)
        per_token = per_token + config.kl_loss_coef * kl
        means["kl"] = kl
    if config.entropy_coeff:
        per_token = per_token - config.entropy_coeff * entropy
    totals["loss"] = weights * per_token
    return totals["loss"].sum(), _metrics(totals, means, policy["ratio"])


@torch.no_grad()
def _metrics(totals: dict[str, Tensor], means: dict[str, Tensor], ratio: Tensor) -> Metrics:
    sums = torch.stack([x.sum(dtype=torch.float64) for x in (*totals.values(), *means.values())]).tolist()
    counts = [0.0] * len(totals) + [float(len(ratio))] * len(means)
    names = [f"actor/{name}" for name in (*totals, *means)]
    metrics = dict(zip(names, zip(sums, counts, strict=True), strict=True))
    if len(ratio):
        metrics |= {"actor/ratio_max": (ratio.max().item(), 1.0), "actor/ratio_min": (ratio.min().item(), 1.0)}
    return metrics
