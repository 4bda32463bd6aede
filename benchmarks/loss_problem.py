"""Random hidden states, output matrix and tokens, for the benchmark of the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_mlm.algorithms.grpo_loss import token_losses
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig
from grpo_mlm.kernels.linear_logprobs import linear_logprobs

SAMPLES = 8
MIB = 1 << 20


@dataclass(frozen=True)
class Problem:
    """Clipped loss of `SAMPLES` equally long responses, fp32; with a k3 KL term, but not where rows are skipped."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # int64 [T]
    tokens: LossTokens  # [T]
    actor: ActorConfig
    kept: Tensor  # int64, rows of weight > 0

    @property
    def budget(self) -> int:
        """Bytes: 1/18 of what autograd needs beyond inputs and gradients, which is 2.5 times the logits."""
        return len(self.hidden) * len(self.weight) * 10 // 18

    def loss(self, logprobs: Tensor, entropy: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Of some rows, which is what a fused loss wants to know."""
        return token_losses(logprobs, entropy, self.tokens.take(rows), self.actor, RolloutCorrectionConfig())


def make_problem(rows: int, hidden: int, vocab: int, skipping: bool = False) -> Problem:
    """With `skipping`, 64% of the rows are not masked and 40% have a gradient; otherwise all do."""
    make = torch.Generator().manual_seed(0)
    h = torch.randn(rows, hidden, generator=make)
    w = torch.empty(vocab, hidden).normal_(0, hidden**-0.5, generator=make)
    targets = torch.randint(0, vocab, (rows,), generator=make)
    logprobs, _ = linear_logprobs(h, w, targets, 1.0, vocab, 32 * MIB)
    # So near the old policy that the loss of the skipping case clips nowhere.
    old = logprobs + (0.01 if skipping else 0.1) * torch.randn(rows, generator=make)
    advantages = torch.randn(SAMPLES, generator=make).repeat_interleave(-(-rows // SAMPLES))[:rows]
    mask = torch.ones(rows)
    if skipping:
        order = torch.randperm(rows, generator=make)
        mask[order[round(0.64 * rows) :]] = 0
        advantages[order[round(0.40 * rows) :]] = 0
    tokens = LossTokens(
        advantages=advantages,
        weights=mask / mask.sum(),
        sample=torch.arange(rows) * SAMPLES // rows,
        old_logprobs=old,
        ref_logprobs=logprobs + 0.2 * torch.randn(rows, generator=make),
    )
    actor = ActorConfig(use_kl_loss=not skipping, kl_loss_coef=0.0 if skipping else 0.05, clip_ratio_c=None)
    return Problem(h.requires_grad_(), w.requires_grad_(), targets, tokens, actor, mask.nonzero()[:, 0])
