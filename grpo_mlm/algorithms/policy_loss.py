"""Per-token policy losses. One function each, in the registry `POLICY_LOSSES`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_mlm.config.schema import ActorConfig

LOG_RATIO_BOUND = 20.0  # exp of more overflows sooner or later; beyond it the gradient is 0

PolicyLoss = Callable[[Tensor, Tensor, Tensor, ActorConfig], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs [R], old_logprobs [R], advantages [R], config) -> (loss [R], what to report of each token [R])."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss `config.policy_loss.loss_mode` of each token, `[R]`, with gradient into `logprobs` only.

    Reported of each token, without gradient: `ratio`, `clipped`, `clipped_lower` (bool) and
    `ppo_kl` = old - new log-prob. Every given token counts: leave masked ones out before the call.
    """
    return POLICY_LOSSES[config.policy_loss.loss_mode](logprobs, old_logprobs, advantages, config)


def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped surrogate with its two sides and dual clip; r = exp(clamp(logp - old, -20, 20)):

        A >= 0:  L = -min(r A, clip(r, 1 - low, 1 + high) A)
        A < 0:   L = min(-c A, the same)

    PPO (arXiv 1707.06347), equation 7, per token as in GRPO (arXiv 2402.03300), equation 3; clip-higher:
    DAPO (arXiv 2503.14476), equation 10; dual clip with bound c: arXiv 1912.09729, equation 5.
    dL/dlogp is -r A inside and *at* the clip boundary and at r = c; 0 beyond, on the side that clips:
    r > 1 + high for A > 0, r < 1 - low and r > c for A < 0.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    unclipped = -ratio * advantages
    bounded = -ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high) * advantages
    clipped = bounded > unclipped
    loss = torch.where(clipped, bounded, unclipped)
    clipped_lower = torch.zeros_like(clipped)
    if config.clip_ratio_c is not None:
        worst = -config.clip_ratio_c * advantages
        clipped_lower = (advantages < 0) & (loss > worst)
        loss = torch.where(clipped_lower, worst, loss)
    report = {"ratio": ratio, "clipped": clipped, "clipped_lower": clipped_lower, "ppo_kl": -log_ratio}
    return loss, {name: values.detach() for name, values in report.items()}


POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": vanilla}
