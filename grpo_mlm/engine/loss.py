"""The loss of one micro-batch: policy loss, KL to the reference and entropy bonus, weighted token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_mlm.algorithms.kl import kl_penalty
from grpo_mlm.algorithms.policy_loss import policy_loss
from grpo_mlm.config.schema import ActorConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.telemetry.reduce import Part


@dataclass(frozen=True)
class MicroLoss:
    """What one micro-batch gives back besides its gradient."""

    logprobs: Tensor  # float32 [R], of the training forward
    loss: float
    metrics: dict[str, Part]


class StepLoss:
    """The loss over a batch's columns; called with the log-probs of each micro-batch."""

    def __init__(
        self, config: ActorConfig, batch: RolloutBatch, weights: np.ndarray, device: torch.device
    ) -> None:
        """`weights`, float32 `[R]`: each token's share of the step's loss, its denominators already in."""
        self.config, self.device = config, device
        columns = {
            "weight": weights,
            "advantage": batch.advantages,
            "old": batch.old_logprobs,
            "ref": batch.ref_logprobs if config.use_kl_loss else None,
        }
        self.columns = {
            name: torch.from_numpy(np.array(values, dtype=np.float32))
            for name, values in columns.items()
            if values is not None
        }

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, pack: PackedSequences
    ) -> tuple[Tensor, MicroLoss]:
        """The micro-batch's share of the step's loss: the sum over micro-batches and replicas is the loss.

        Tokens of weight 0 are left out before any arithmetic, so nothing in their cells can reach a gradient.
        """
        live = self.columns["weight"][pack.index].nonzero()[:, 0]
        column = {name: values[pack.index][live].to(self.device) for name, values in self.columns.items()}
        live = live.to(self.device)
        loss, metrics = self._weighted(logprobs[live], entropy[live], column)
        return loss, MicroLoss(logprobs.detach(), loss.item(), metrics)

    def _weighted(
        self, logprobs: Tensor, entropy: Tensor, column: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Part]]:
        config, weight = self.config, column["weight"]
        # Without stored log-probs this forward is the old policy: the ratio is 1, its gradient the policy's.
        old = column.get("old", logprobs.detach())
        policy, parts = policy_loss(logprobs, old, column["advantage"], config)
        means = {"pg_clipfrac": parts["clipped"], "pg_clipfrac_lower": parts["clipped_lower"]}
        means |= {"ppo_kl": parts["ppo_kl"], "entropy": entropy.detach()}
        total = policy
        if config.use_kl_loss:
            kl = kl_penalty(logprobs, column["ref"], config.kl_loss_type)
            total = total + config.kl_loss_coef * kl
            means["kl"] = kl.detach()
        if config.entropy_coeff:
            total = total - config.entropy_coeff * entropy
        loss = (weight * total).sum()
        metrics = {
            f"actor/{name}": Part("mean", values.sum().item(), len(weight)) for name, values in means.items()
        }
        metrics["actor/loss"] = Part("sum", loss.item())
        metrics["actor/pg_loss"] = Part("sum", (weight * policy.detach()).sum().item())
        if len(weight):
            metrics["actor/ratio_max"] = Part("max", parts["ratio"].max().item())
            metrics["actor/ratio_min"] = Part("min", parts["ratio"].min().item())
        return loss, metrics
