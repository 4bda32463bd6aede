"""The ragged batch of one step, from rollout to loss: flat arrays and lengths, no padding anywhere.

Sample i owns `tokens[cu_seqlens[i]:cu_seqlens[i+1]]`; its first `prompt_lens[i]` are the prompt, the rest the
response. Per-token response columns are flat over all responses, in sample order, `[R]`, R = sum of response
lengths. What is trained on follows from lengths alone, never from token values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_mlm.errors import UserError

# Per-token columns `[R]`; None until the phase that makes them has run.
TOKEN_COLUMNS = (
    "rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "response_mask", "is_weights"
)  # fmt: skip


@dataclass
class RolloutBatch:
    """Samples of one step.

    `reward` is NaN exactly where `valid` is False. `finish_reason` is "stop", "length" or "abort".
    """

    tokens: np.ndarray  # int64 [T]
    cu_seqlens: np.ndarray  # int64 [N+1]
    prompt_lens: np.ndarray  # int64 [N]
    group_id: np.ndarray  # int64 [N], the prompt instance
    sample_index: np.ndarray  # int64 [N], 0..n-1 inside the group
    weight_version: np.ndarray  # int64 [N], version of the weights that sampled it
    rollout_logprobs: np.ndarray  # float32 [R], by the engine, at the sampling temperature
    reward: np.ndarray  # float64 [N]
    valid: np.ndarray  # bool [N]
    gen_seconds: np.ndarray  # float64 [N]
    reward_seconds: np.ndarray  # float64 [N]
    reward_parts: dict[str, np.ndarray] = field(
        default_factory=dict
    )  # name -> float64 [N], NaN where invalid
    finish_reason: list[str] = field(default_factory=list)  # [N]
    data_source: list[str] = field(default_factory=list)  # [N]
    prompt_text: list[str] = field(default_factory=list)  # [N], for people
    response_text: list[str] = field(default_factory=list)  # [N], for people and rewards
    answer: list[str] = field(default_factory=list)  # [N], for people
    reason: list[str] = field(default_factory=list)  # [N], why a sample is invalid, or the reward's note
    baseline: np.ndarray | None = None  # float64 [N], reward of the greedy response to the prompt; NaN: none
    old_logprobs: np.ndarray | None = None  # float32 [R]
    ref_logprobs: np.ndarray | None = None  # float32 [R]
    advantages: np.ndarray | None = None  # float32 [R]
    response_mask: np.ndarray | None = None  # bool [R], False: rejected, has no part in the loss
    is_weights: np.ndarray | None = None  # float32 [R], importance weights of the policy term

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @property
    def seq_lens(self) -> np.ndarray:
        """Tokens of each sample, prompt and response, int64 [N]."""
        return np.diff(self.cu_seqlens)

    @property
    def response_lens(self) -> np.ndarray:
        """Response tokens of each sample, int64 [N]."""
        return self.seq_lens - self.prompt_lens

    @property
    def cu_responses(self) -> np.ndarray:
        """Offsets of each sample's response in the per-token columns, int64 [N+1]."""
        return np.concatenate([[0], np.cumsum(self.response_lens)])

    def sample_tokens(self, i: int) -> np.ndarray:
        """Token ids of sample i, prompt and response."""
        return self.tokens[self.cu_seqlens[i] : self.cu_seqlens[i + 1]]

    def without_training_columns(self) -> RolloutBatch:
        """The batch as it was when sampling and scoring ended."""
        return replace(
            self, old_logprobs=None, ref_logprobs=None, advantages=None, response_mask=None, is_weights=None
        )

    def check(self) -> None:
        """Raise ValueError where lengths disagree: ids and log-probs must be those that were sampled."""
        n = len(self)
        spans = len(self.cu_seqlens) == n + 1 and self.cu_seqlens[0] == 0
        if not spans or self.cu_seqlens[-1] != len(self.tokens):
            raise ValueError(
                f"cu_seqlens {self.cu_seqlens[:3]}..{self.cu_seqlens[-1:]} do not span "
                f"{len(self.tokens)} tokens of {n} samples"
            )
        if n and (self.prompt_lens.min() < 1 or self.response_lens.min() < 0):
            raise ValueError("every sample needs at least one prompt token and no negative response length")
        r = int(self.response_lens.sum())
        for name in TOKEN_COLUMNS:
            column = getattr(self, name)
            if column is not None and len(column) != r:
                raise ValueError(f"{name} has {len(column)} values for {r} response tokens")
        for f in fields(self):
            column = getattr(self, f.name)
            per_sample = f.name not in (*TOKEN_COLUMNS, "tokens", "cu_seqlens", "reward_parts")
            if per_sample and column is not None and len(column) != n:
                raise ValueError(f"{f.name} has {len(column)} entries for {n} samples")
        for name, values in self.reward_parts.items():
            if len(values) != n:
                raise ValueError(f"reward part {name} has {len(values)} entries for {n} samples")

    def save(self, path: Path) -> None:
        """Write the whole batch as one safetensors file; its text columns are the UTF-8 bytes of one JSON object."""
        arrays, texts = {}, {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, np.ndarray):
                arrays[f.name] = np.ascontiguousarray(value)
            elif isinstance(value, dict):
                arrays |= {f"{f.name}/{key}": np.ascontiguousarray(v) for key, v in value.items()}
            elif value is not None:
                texts[f.name] = value
        # Not in the file's metadata: safetensors reads a header of 100 MB at most.
        arrays["texts"] = np.frombuffer(json.dumps(texts).encode(), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(path.suffix + ".tmp")
        save_file(arrays, aside)
        aside.replace(path)

    @classmethod
    def load(cls, path: Path) -> RolloutBatch:
        """Read a batch written by `save`; UserError names the file when it is not one."""
        columns: dict[str, Any] = {"reward_parts": {}}
        try:
            with safe_open(path, framework="numpy") as file:
                columns |= json.loads(file.get_tensor("texts").tobytes())
                for key in sorted(set(file.keys()) - {"texts"}):
                    name, _, part = key.partition("/")
                    if part:
                        columns[name][part] = file.get_tensor(key)
                    else:
                        columns[name] = file.get_tensor(key)
            batch = cls(**columns)
            batch.check()
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise UserError(f"{path} is not a saved rollout batch: {error}") from error
        return batch
