"""The loss that GRPO descends, on the tokens of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_mlm.algorithms import policy_loss, sequence_loss
from grpo_mlm.algorithms.kl import kl_penalty
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.algorithms.rollout_correction import correct
from grpo_mlm.config.functions import load_function
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig
from grpo_mlm.telemetry.reduce import Part

PolicyLoss = Callable[[Tensor, LossTokens, ActorConfig], tuple[Tensor, policy_loss.Report]]
"""(logprobs [R], tokens, config) -> (loss [R], what to report of each token). Every given token counts."""

TOKEN_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": policy_loss.vanilla,
    "cispo": policy_loss.cispo,
    "sapo": policy_loss.sapo,
    "dppo_tv": policy_loss.dppo_tv,
    "dppo_kl": policy_loss.dppo_kl,
    "clip_cov": policy_loss.clip_cov,
    "kl_cov": policy_loss.kl_cov,
}
SAMPLE_LOSSES: dict[str, PolicyLoss] = {"gspo": sequence_loss.gspo, "geo_mean": sequence_loss.geo_mean}
POLICY_LOSSES = TOKEN_LOSSES | SAMPLE_LOSSES


def policy_loss_function(name: str) -> PolicyLoss:
    """By its name here, or the user's own by `module:function`."""
    return POLICY_LOSSES.get(name) or load_function(name, "actor.policy_loss.loss_mode")


def needs_whole_samples(actor: ActorConfig, correction: RolloutCorrectionConfig) -> bool:
    """Whether a token's loss depends on other tokens of its sample; then the logits are made twice, once for the
    log-probs and once for their gradient. Of a user's loss that is not known, and assumed."""
    over_samples = correction.mode == "bypass" and correction.over_samples
    return actor.policy_loss.loss_mode not in TOKEN_LOSSES or over_samples


def flat_without_advantage(actor: ActorConfig) -> bool:
    """Whether tokens of advantage 0 have no gradient. Of a user's loss that is not known."""
    known = actor.policy_loss.loss_mode in POLICY_LOSSES and actor.policy_loss.loss_mode != "kl_cov"
    return known and not actor.use_kl_loss and not actor.entropy_coeff


def token_losses(
    logprobs: Tensor,
    entropy: Tensor,
    tokens: LossTokens,
    actor: ActorConfig,
    correction: RolloutCorrectionConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """w_t (c_t L_policy,t + kl_loss_coef KL_t - entropy_coeff H_t) of each token, `[R]`; arXiv 2402.03300, equation 3.

    `logprobs` and `entropy` float32 `[R]`, which carry the gradient. The weights w hold the denominators of the whole
    optimizer step: losses and gradients are summed over micro-batches and ranks. c are importance weights of the
    rollout correction, 1 without it. The second result tells of each token what `loss_metrics` sums up.
    """
    loss, found = policy_loss_function(actor.policy_loss.loss_mode)(logprobs, tokens, actor)
    weights, is_weights = tokens.weights, tokens.is_weights
    if correction.mode == "bypass" and correction.active:
        assert tokens.rollout_logprobs is not None
        made = correct(logprobs.detach(), tokens.rollout_logprobs, tokens.sample, correction)
        weights, is_weights = weights * made.keep, made.is_weights
        found = found | {"kept": made.keep}
    if is_weights is not None:
        loss = loss * is_weights
    found = found | {"pg_loss": weights * loss, "entropy": entropy}
    if actor.use_kl_loss:
        assert tokens.ref_logprobs is not None
        kl = kl_penalty(logprobs, tokens.ref_logprobs, actor.kl_loss_type)
        loss = loss + actor.kl_loss_coef * kl
        found["kl"] = kl
    if actor.entropy_coeff:
        loss = loss - actor.entropy_coeff * entropy
    loss = weights * loss
    found["loss"] = loss
    return loss, {name: column.detach() for name, column in found.items()}


_SUMS = ("loss", "pg_loss")
_NAMES = {"clipped": "pg_clipfrac", "clipped_lower": "pg_clipfrac_lower", "kept": "rs_kept_fraction"}


def loss_metrics(found: dict[str, Tensor]) -> dict[str, Part]:
    """What a micro-batch has to say of its tokens, ready to be joined with that of others."""
    # Summed together: one wait for the device, not one a metric.
    sums = torch.stack([x.sum(dtype=torch.float64) for x in found.values()]).tolist() if found else []
    metrics = {}
    for (name, column), value in zip(found.items(), sums, strict=True):
        if name != "ratio":
            part = Part("sum", value) if name in _SUMS else Part("mean", value, len(column))
            metrics[f"actor/{_NAMES.get(name, name)}"] = part
    ratio = found.get("ratio")
    if ratio is not None and len(ratio):
        metrics["actor/ratio_max"] = Part("max", ratio.max().item())
        metrics["actor/ratio_min"] = Part("min", ratio.min().item())
    return metrics
