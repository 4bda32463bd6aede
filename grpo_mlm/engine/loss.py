"""Brings each micro-batch's hidden states together with its columns of the batch, and calls the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mlm.algorithms.grpo_loss import loss_metrics, needs_whole_samples, token_losses
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.head import Head
from grpo_mlm.telemetry.reduce import Part


@dataclass(frozen=True)
class MicroLoss:
    """What one micro-batch gives back besides its gradient."""

    logprobs: Tensor  # float32 [R], of the training forward; NaN where no loss asked for them
    finite: bool
    metrics: dict[str, Part]


class StepLoss:
    """The loss of one optimizer step, micro-batch by micro-batch."""

    def __init__(
        self,
        actor: ActorConfig,
        correction: RolloutCorrectionConfig,
        batch: RolloutBatch,
        weights: np.ndarray,
        selected: np.ndarray | None,
        device: torch.device,
    ) -> None:
        """`weights`, float32 `[R]`: each token's share of the step's loss, its denominators already in. `selected`,
        bool `[R]`: the tokens that the covariance losses treat apart."""
        self.actor, self.correction, self.device = actor, correction, device
        self.batch, self.weights, self.selected = batch, weights, selected
        self.sample = np.repeat(np.arange(len(batch)), batch.response_lens)
        self.whole_samples = needs_whole_samples(actor, correction)

    def __call__(self, head: Head, hidden: Tensor, pack: PackedSequences) -> tuple[Tensor, MicroLoss]:
        """The micro-batch's loss; the sum over micro-batches and replicas is the step's.

        Tokens of weight 0 leave before the product with the head's matrix, so nothing in their cells can reach loss,
        gradient or metrics.
        """
        index = pack.index.numpy()
        kept = np.flatnonzero(self.weights[index])
        rows, targets = pack.rows[kept], pack.targets[kept]
        tokens = self._tokens(index[kept])
        if self.whole_samples:
            logprobs, entropy = head.logprobs(hidden, rows, targets)
            values, report = token_losses(logprobs, entropy, tokens, self.actor, self.correction)
            loss = values.sum()
        else:

            def loss_fn(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                return token_losses(logprobs, entropy, tokens.take(rows), self.actor, self.correction)

            loss, logprobs, report = head.loss(hidden, rows, targets, loss_fn, bool(self.actor.entropy_coeff))
        every = torch.full((len(index),), torch.nan, device=self.device)
        every[torch.from_numpy(kept).to(self.device)] = logprobs.detach()
        return loss, MicroLoss(every, math.isfinite(loss.item()), loss_metrics(report))

    def _tokens(self, index: np.ndarray) -> LossTokens:
        batch = self.batch
        assert batch.advantages is not None
        return LossTokens(
            advantages=self._column(batch.advantages, index),
            weights=self._column(self.weights, index),
            sample=torch.from_numpy(self.sample[index]).to(self.device),
            old_logprobs=self._optional(batch.old_logprobs, index),
            ref_logprobs=self._optional(batch.ref_logprobs, index),
            rollout_logprobs=self._column(batch.rollout_logprobs, index),
            is_weights=self._optional(batch.is_weights, index),
            selected=None
            if self.selected is None
            else torch.from_numpy(self.selected[index]).to(self.device),
        )

    def _optional(self, values: np.ndarray | None, index: np.ndarray) -> Tensor | None:
        return None if values is None else self._column(values, index)

    def _column(self, values: np.ndarray, index: np.ndarray) -> Tensor:
        return torch.from_numpy(values[index].astype(np.float32)).to(self.device)
