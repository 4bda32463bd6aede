"""Logits become their own gradient, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_mlm.kernels.row_stats import owned


def grad_logits_(
    logits: Tensor,
    targets: Tensor,
    log_normaliser: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
) -> None:
    """Overwrite a block of logits z `[R, C]` with the gradient by them of a loss that knows log-prob and entropy only:

        d loss / d z_j = g_logp ([j = target] - p_j) - g_ent p_j (log p_j + H),   log p_j = z_j - log_normaliser

    All others are `[R]`: `targets` int64 columns of the block, or outside 0..C-1, the rest float32. Rounding
    `log_normaliser` costs the probabilities as many digits as rounding the logits did.
    """
    mine, column = owned(targets, logits.shape[1])
    logp = logits.sub_(log_normaliser[:, None])
    if grad_entropy is None:
        gradient = logp.exp_().mul_(-grad_logprob[:, None])
    else:
        p = logp.exp()
        gradient = (
            logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None]).sub_(grad_logprob[:, None]).mul_(p)
        )
    gradient.scatter_add_(1, column[:, None], torch.where(mine, grad_logprob, 0.0)[:, None])
