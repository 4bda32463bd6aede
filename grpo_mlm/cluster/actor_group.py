"""The trainer's ranks as one object: cuts a batch over data-parallel ranks, calls all, joins what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.algorithms.covariance import select_tokens
from grpo_mlm.algorithms.grpo_loss import flat_without_advantage
from grpo_mlm.cluster.process import Process, ProcessGroup
from grpo_mlm.config.schema import ActorConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import pack
from grpo_mlm.telemetry.reduce import reduce_metrics


class ActorGroup(ProcessGroup):
    """One Megatron process a rank; `dp` of them hold different samples, the others share those of a replica."""

    def __init__(self, processes: list[Process], dp: int, config: ActorConfig, timeout_s: float) -> None:
        super().__init__(processes, timeout_s)
        self.dp = dp
        self.config = config

    def logprobs(self, batch: RolloutBatch, which: str) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropies of every response token under the `actor` or the `ref` weights, `[R]` each."""
        schedule = pack(batch.seq_lens, np.arange(len(batch)), self.dp, self.config.max_tokens_per_gpu)
        replies = self.call("logprobs", ray.put(batch), schedule, which)
        return _scatter(batch, replies, "logprobs"), _scatter(batch, replies, "entropy")

    def update(
        self, batch: RolloutBatch, mini: np.ndarray, trained: np.ndarray, rng: np.random.Generator
    ) -> tuple[dict[str, float], np.ndarray]:
        """One optimizer step on the `trained` samples of the mini-batch; `rng` draws what a loss leaves to chance.

        Returns the metrics over the whole step, and the log-probs of the training forward `[R]` (NaN elsewhere).
        The denominators of the loss are those of this step, over every rank and micro-batch. Samples that can
        have no gradient (advantage 0, and no KL or entropy term) count in them, but are not computed: metrics that are
        means over tokens are over the others.
        """
        chosen = np.zeros(len(batch), dtype=bool)
        chosen[mini] = True
        chosen &= trained
        cfg = self.config
        weights = token_weights(batch.response_lens, chosen, cfg.loss_agg_mode, cfg.loss_scale_factor)
        if batch.response_mask is not None:
            weights *= batch.response_mask  # rejected tokens stay in the denominators
        selected = None
        if cfg.policy_loss.loss_mode in ("clip_cov", "kl_cov"):
            assert batch.old_logprobs is not None
            assert batch.advantages is not None
            selected = select_tokens(batch.old_logprobs, batch.advantages, weights > 0, cfg.policy_loss, rng)
        if flat_without_advantage(cfg):
            chosen &= _has_advantage(batch)
        schedule = pack(batch.seq_lens, np.flatnonzero(chosen), self.dp, cfg.max_tokens_per_gpu)
        replies = self.call("update", ray.put(batch), schedule, weights.astype(np.float32), selected)
        return reduce_metrics([reply["metrics"] for reply in replies]), _scatter(batch, replies, "logprobs")


def _has_advantage(batch: RolloutBatch) -> np.ndarray:
    """Samples with some advantage other than 0, bool `[N]`."""
    assert batch.advantages is not None
    sample = np.repeat(np.arange(len(batch)), batch.response_lens)
    return np.bincount(sample, weights=np.abs(batch.advantages), minlength=len(batch)) > 0


def _scatter(batch: RolloutBatch, replies: Sequence[dict[str, Any] | None], column: str) -> np.ndarray:
    """Put the replicas' per-token values back in the batch's order, float32 `[R]`."""
    offsets = batch.cu_responses
    values = np.full(int(offsets[-1]), np.nan, dtype=np.float32)
    for reply in replies:
        if reply is None or column not in reply:
            continue
        begin = 0
        for i in reply["indices"]:
            length = int(offsets[i + 1] - offsets[i])
            values[offsets[i] : offsets[i + 1]] = reply[column][begin : begin + length]
            begin += length
    return values
