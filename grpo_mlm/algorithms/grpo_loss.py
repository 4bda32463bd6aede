"""The loss that GRPO descends, on the tokens of one micro-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mlm.algorithms.kl import kl_penalty
from grpo_mlm.algorithms.policy_loss import policy_loss
from grpo_mlm.config.schema import ActorConfig
from grpo_mlm.telemetry.reduce import Part


def loss_and_metrics(
    logprobs: Tensor,
    entropy: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    config: ActorConfig,
) -> tuple[Tensor, dict[str, Part]]:
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
def _metrics(totals: dict[str, Tensor], means: dict[str, Tensor], ratio: Tensor) -> dict[str, Part]:
    columns = totals | means
    # Summed together: one wait for the device, not one a metric.
    sums = torch.stack([x.sum(dtype=torch.float64) for x in columns.values()]).tolist()
    metrics = {
        f"actor/{name}": Part("sum", value) if name in totals else Part("mean", value, len(ratio))
        for name, value in zip(columns, sums, strict=True)
    }
    if len(ratio):
        metrics["actor/ratio_max"] = Part("max", ratio.max().item())
        metrics["actor/ratio_min"] = Part("min", ratio.min().item())
    return metrics
