"""The same numbers by torch's own log_softmax in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs and entropies `[R]`, and the gradients by hidden `[R, H]` and weight `[V, H]`, all float64."""
    h = hidden.detach().double().requires_grad_()
    w = weight.detach().double().requires_grad_()
    logp = torch.log_softmax(h @ w[:vocab_size].T / temperature, dim=1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    entropy = -(logp.exp() * logp).sum(1)
    gradients = torch.autograd.grad((chosen * grad_logprob).sum() + (entropy * grad_entropy).sum(), (h, w))
    return chosen.detach(), entropy.detach(), *gradients
