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
        self.columns = {
            "weights": weights,
            "advantages": batch.advantages,
            "old_logprobs": batch.old_logprobs,
            "ref_logprobs": batch.ref_logprobs,
        }

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, pack: PackedSequences
    ) -> tuple[Tensor, MicroLoss]:
        """The micro-batch's loss; the sum over micro-batches and replicas is the step's."""
        columns = {name: self._column(values, pack) for name, values in self.columns.items()}
        loss, metrics = loss_and_metrics(logprobs, entropy, **columns, config=self.config)
        return loss, MicroLoss(logprobs.detach(), math.isfinite(loss.item()), metrics)

    def _column(self, values: np.ndarray | None, pack: PackedSequences) -> Tensor | None:
        if values is None:
            return None
        return torch.from_numpy(values[pack.index.numpy()].astype(np.float32)).to(self.device)
