"""Keeps ids that the tokenizer does not know from being sampled: models often have more rows than tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from grpo_mlm.layouts.known_tokens import known_tokens


class KnownTokens(LogitsProcessor):
    """Ids past the tokenizer's last one get no probability, in what is sampled and in its log-probs."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.known = known_tokens(Path(vllm_config.model_config.model))

    def apply(self, logits: Tensor) -> Tensor:
        """Logits `[requests, vocabulary]`, changed in place."""
        logits[:, self.known :] = -torch.inf
        return logits

    def is_argmax_invariant(self) -> bool:
        """Greedy sampling needs it too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Nothing here depends on the requests."""
