"""What goes to an engine and what comes back. Plain data: crosses processes, imports nothing heavy."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every field is sent explicitly, so that a model's generation_config.json has no say."""

    temperature: float
    max_tokens: int
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw: sample `sample_index` of prompt instance `group_id`."""

    group_id: int
    sample_index: int
    prompt_ids: tuple[int, ...]
    seed: int

    @property
    def request_id(self) -> str:
        return f"{self.group_id}-{self.sample_index}"


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample drawn: ids and log-probs exactly as the engine produced them."""

    group_id: int
    sample_index: int
    token_ids: np.ndarray  # int64 [L], with the stop token where one ended it
    logprobs: np.ndarray  # float32 [L], at the sampling temperature
    text: str  # for rewards and people
    finish_reason: str  # "stop", "length" or "abort"
    weight_version: int
    seconds: float


def request_seed(run_seed: int, step: int, group_id: int, sample_index: int) -> int:
    """A request's own seed: a hash, so it depends on neither scheduling nor the number of engines."""
    text = f"{run_seed}/{step}/{group_id}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
