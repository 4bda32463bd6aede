"""Brings each micro-batch's log-probs together with its columns of the batch, and calls the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mlm.algorithms.grpo_loss import loss_and_metrics
from grpo_mlm.config.schema import ActorConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.telemetry.reduce import Part


@dataclass(frozen=True)
class MicroLoss:
    """What one micro-batch gives back besides its gradient."""

    logprobs: Tensor  # float32 [R], of the training forward
    finite: bool
    metrics: dict[str, Part]


class StepLoss:
    """The loss of one optimizer step, micro-batch by micro-batch."""

    def __init__(
        self, config: ActorConfig, batch: RolloutBatch, weights: np.ndarray, device: torch.device
    ) -> None:
        """`weights`, float32 `[R]`: each token's share of the step's loss, its denominators already in."""
        self.config, self.device = config, device
        assert batch.advantages is not None
        self.weights, self.advantages = weights, batch.advantages
        self.old_logprobs, self.ref_logprobs = batch.old_logprobs, batch.ref_logprobs

    def __call__(self, logprobs: Tensor, entropy: Tensor, pack: PackedSequences) -> tuple[Tensor, MicroLoss]:
        """The micro-batch's loss; the sum over micro-batches and replicas is the step's."""
        index = pack.index.numpy()
        loss, metrics = loss_and_metrics(
            logprobs,
            entropy,
            old_logprobs=None if self.old_logprobs is None else self._tensor(self.old_logprobs[index]),
            ref_logprobs=None if self.ref_logprobs is None else self._tensor(self.ref_logprobs[index]),
            advantages=self._tensor(self.advantages[index]),
            weights=self._tensor(self.weights[index]),
            config=self.config,
        )
        return loss, MicroLoss(logprobs.detach(), math.isfinite(loss.item()), metrics)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.float32)).to(self.device)
