"""Policy losses whose ratio is that of a whole sample. Each token carries its sample's loss, so that a mean over tokens
and a mean over samples of their means are both what they say."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.algorithms.per_sample import sample_mean
from grpo_mlm.algorithms.policy_loss import LOG_RATIO_BOUND, Report, clipped_surrogate, report
from grpo_mlm.config.schema import ActorConfig


def gspo(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -min(s A, clip(s, 1 - low, 1 + high) A)` at every token of a sample,

        s = exp(1/T sum_t (logp_t - old_logp_t)), the geometric mean of its T ratios.

    GSPO (arXiv 2507.18071), equations 5 and 7; its clip range is about 3e-4. With s_t = sg(s) exp(logp_t - sg(logp_t))
    as in its GSPO-token form (equation 13), dL/dlogp_t is -s A inside and at the boundary, 0 beyond; summed with
    weights 1/T that is the gradient of the sequence form.
    """
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    log_s = sample_mean((logprobs.detach() - old), tokens.sample).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_s.exp() * (logprobs - logprobs.detach()).exp()
    loss, clipped = clipped_surrogate(ratio, tokens.advantages, config)
    return loss, report(ratio, clipped, (old - logprobs).detach())


def geo_mean(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -A exp(1/T sum_t k_t)` at every token of a sample; k_t is the log-ratio d_t, clipped the way A drives it:

        A > 0:  k_t = min(d_t, high)        A < 0:  k_t = max(d_t, -low)

    GMPO (arXiv 2507.20673), equations 3 and 4, with its clip range in log space (0.4 in the paper). dL/dlogp_t of one
    sample's mean loss is -A/T exp(mean k) up to and at the boundary, 0 for the tokens beyond.
    """
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    up, down = log_ratio > config.clip_ratio_high, log_ratio < -config.clip_ratio_low
    clipped = torch.where(tokens.advantages > 0, up, down) & (tokens.advantages != 0)
    bound = torch.where(tokens.advantages > 0, config.clip_ratio_high, -config.clip_ratio_low)
    ratio = sample_mean(torch.where(clipped, bound, log_ratio), tokens.sample).exp()
    return -ratio * tokens.advantages, report(ratio, clipped, (old - logprobs).detach())
