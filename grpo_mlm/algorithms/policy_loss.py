"""Per-token policy losses: one function each, in the registry `POLICY_LOSSES`.

All are minimised. `A` is the advantage, `logp` the log-prob of the sampled token, and everywhere
r = exp(clamp(logp - old_logp, -20, 20)). A loss here reads one token at a time; those over whole samples are in
`sequence_loss.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.config.schema import ActorConfig

LOG_RATIO_BOUND = 20.0  # exp of more overflows sooner or later; beyond it the gradient is 0

Report = dict[str, Tensor]
"""Of each token `[R]`, without gradient: `ratio`, `clipped`, `clipped_lower` (bool), `ppo_kl` (old - new log-prob)."""


def vanilla(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """The clipped surrogate with its two sides and dual clip:

        A >= 0:  L = -min(r A, clip(r, 1 - low, 1 + high) A)
        A < 0:   L = min(-c A, the same)

    PPO (arXiv 1707.06347), equation 7, per token as in GRPO (arXiv 2402.03300), equation 3; clip-higher:
    DAPO (arXiv 2503.14476), equation 10; dual clip with bound c: arXiv 1912.09729, equation 5.
    dL/dlogp is -r A inside and *at* the clip boundary and at r = c; 0 beyond, on the side that clips:
    r > 1 + high for A > 0, r < 1 - low and r > c for A < 0.
    """
    ratio, ppo_kl = ratio_to_old(logprobs, tokens.old_logprobs)
    loss, clipped = clipped_surrogate(ratio, tokens.advantages, config)
    clipped_lower = torch.zeros_like(clipped)
    if config.clip_ratio_c is not None:
        worst = -config.clip_ratio_c * tokens.advantages
        clipped_lower = (tokens.advantages < 0) & (loss > worst)
        loss = torch.where(clipped_lower, worst, loss)
    return loss, report(ratio, clipped, ppo_kl, clipped_lower)


def cispo(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -sg(clip(r, 1 - low, 1 + high)) A logp`, sg: no gradient through it.

    MiniMax-M1 (arXiv 2506.13585), equations 4 and 5. dL/dlogp is -clip(r) A: no token loses its gradient, beyond the
    boundary it only stops to grow.
    """
    ratio, ppo_kl = ratio_to_old(logprobs, tokens.old_logprobs)
    bounded = ratio.detach().clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -bounded * tokens.advantages * logprobs, report(ratio, bounded != ratio, ppo_kl)


def sapo(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -A (4 / tau) sigmoid(tau (r - 1))`, tau = tau_pos for A > 0, else tau_neg.

    SAPO (arXiv 2511.20347), equations 5 and 6. dL/dlogp is -A r 4 s (1 - s), s the sigmoid: -A at r = 1, and fading
    on both sides of it instead of a boundary.
    """
    ratio, ppo_kl = ratio_to_old(logprobs, tokens.old_logprobs)
    tau = torch.where(tokens.advantages > 0, config.policy_loss.tau_pos, config.policy_loss.tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return -gate * tokens.advantages, report(ratio, torch.zeros_like(ratio, dtype=torch.bool), ppo_kl)


def dppo_tv(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -sg(M min(r, c)) A logp`; M = 0 where the token's probability p has moved too far the way A drives it:

        A > 0:  p - p_old > high        A <= 0:  p_old - p > low

    DPPO (arXiv 2602.04879), binary total variation; `clip_ratio_low`, `clip_ratio_high` are its thresholds and
    `clip_ratio_c` the bound of the ratio (20 in the paper). dL/dlogp is -min(r, c) A up to and at the threshold, 0
    beyond.
    """
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    moved = logprobs.detach().exp() - old.exp()
    towards = torch.where(
        tokens.advantages > 0, moved > config.clip_ratio_high, -moved > config.clip_ratio_low
    )
    return _masked_reinforce(logprobs, tokens, config, towards)


def dppo_kl(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """As `dppo_tv`, with the divergence of two coins that show this token or another:

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    M = 0 where D exceeds `clip_ratio_high` and p > p_old for A > 0; `clip_ratio_low` and p < p_old for A <= 0.
    DPPO (arXiv 2602.04879), binary KL.
    """
    new = logprobs.detach()
    old = new if tokens.old_logprobs is None else tokens.old_logprobs
    divergence = old.exp() * (old - new) - torch.expm1(old).neg() * (_log_other(new) - _log_other(old))
    up = (new > old) & (divergence > config.clip_ratio_high)
    down = (new < old) & (divergence > config.clip_ratio_low)
    return _masked_reinforce(logprobs, tokens, config, torch.where(tokens.advantages > 0, up, down))


def clip_cov(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`vanilla`, but without gradient at the `selected` tokens: a random `clip_cov_ratio` of those whose covariance of
    log-prob and advantage lies between `clip_cov_lb` and `clip_cov_ub`.

    The Entropy Mechanism (arXiv 2505.22617), equations 10 to 12. `covariance.select_tokens` selects them.
    """
    assert tokens.selected is not None
    loss, found = vanilla(logprobs, tokens, config)
    return torch.where(tokens.selected, loss.detach(), loss), found | {
        "clipped": found["clipped"] | tokens.selected
    }


def kl_cov(logprobs: Tensor, tokens: LossTokens, config: ActorConfig) -> tuple[Tensor, Report]:
    """`L = -r A`, plus `ppo_kl_coef |logp - old_logp|` at the `selected` tokens: the `kl_cov_ratio` of all with the
    greatest covariance of log-prob and advantage.

    The Entropy Mechanism (arXiv 2505.22617), equations 13 and 14. dL/dlogp is -r A, plus the coefficient towards the
    old log-prob, 0 at it. Nothing is clipped.
    """
    assert tokens.selected is not None
    ratio, ppo_kl = ratio_to_old(logprobs, tokens.old_logprobs)
    old = logprobs.detach() if tokens.old_logprobs is None else tokens.old_logprobs
    penalty = config.policy_loss.ppo_kl_coef * (logprobs - old).abs()
    loss = -ratio * tokens.advantages + torch.where(tokens.selected, penalty, 0.0)
    return loss, report(ratio, tokens.selected, ppo_kl)


def ratio_to_old(logprobs: Tensor, old_logprobs: Tensor | None) -> tuple[Tensor, Tensor]:
    """r with its gradient, and old - new log-prob; without old log-probs r is 1, its gradient that of the log-prob."""
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    log_ratio = logprobs - old
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), -log_ratio.detach()


def clipped_surrogate(ratio: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """`-min(r A, clip(r, 1 - low, 1 + high) A)`, and where the clipped side was taken."""
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantages
    clipped = bounded > unclipped
    return torch.where(clipped, bounded, unclipped), clipped


def report(ratio: Tensor, clipped: Tensor, ppo_kl: Tensor, clipped_lower: Tensor | None = None) -> Report:
    """What every loss tells of its tokens."""
    lower = torch.zeros_like(clipped) if clipped_lower is None else clipped_lower
    columns = {"ratio": ratio, "clipped": clipped, "clipped_lower": lower, "ppo_kl": ppo_kl}
    return {name: column.detach() for name, column in columns.items()}


def _masked_reinforce(
    logprobs: Tensor, tokens: LossTokens, config: ActorConfig, masked: Tensor
) -> tuple[Tensor, Report]:
    ratio, ppo_kl = ratio_to_old(logprobs, tokens.old_logprobs)
    bound = float("inf") if config.clip_ratio_c is None else config.clip_ratio_c
    truncated = ratio.detach().clamp(max=bound)
    loss = -torch.where(masked, 0.0, truncated) * tokens.advantages * logprobs
    return loss, report(ratio, masked, ppo_kl, ~masked & (ratio > bound))


def _log_other(logprobs: Tensor) -> Tensor:
    """log(1 - p), finite: a p that rounds to 1 is taken as the fp32 number below it."""
    return torch.log((-torch.expm1(logprobs)).clamp(min=torch.finfo(torch.float32).eps / 2))
