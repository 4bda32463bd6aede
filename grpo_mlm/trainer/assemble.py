"""From finished samples to the step's batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.prompts import Prompt
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.rollout.request import Completion


@dataclass(frozen=True)
class Finished:
    """One sample with everything that is known of it when its step's sampling ends."""

    group_id: int
    prompt: Prompt
    completion: Completion
    result: RewardResult


def assemble(samples: Sequence[Finished]) -> RolloutBatch:
    """The samples' batch, in the given order. ValueError where a sample's ids and log-probs do not pair up."""
    for s in samples:
        done = s.completion
        if len(done.token_ids) != len(done.logprobs):
            raise ValueError(
                f"sample {s.group_id}-{done.sample_index}: "
                f"{len(done.token_ids)} token ids, {len(done.logprobs)} log-probs"
            )
    prompts = [np.array(s.prompt.token_ids, dtype=np.int64) for s in samples]
    responses = [np.asarray(s.completion.token_ids, dtype=np.int64) for s in samples]
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    names = sorted({name for s in samples for name in s.result.parts})
    batch = RolloutBatch(
        tokens=np.concatenate([ids for pair in zip(prompts, responses, strict=True) for ids in pair]),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lens=np.array([len(p) for p in prompts], dtype=np.int64),
        group_id=np.array([s.group_id for s in samples], dtype=np.int64),
        sample_index=np.array([s.completion.sample_index for s in samples], dtype=np.int64),
        weight_version=np.array([s.completion.weight_version for s in samples], dtype=np.int64),
        rollout_logprobs=np.concatenate(
            [np.asarray(s.completion.logprobs, dtype=np.float32) for s in samples]
        ),
        reward=np.array([np.nan if s.result.invalid else s.result.value for s in samples], dtype=np.float64),
        valid=np.array([not s.result.invalid for s in samples], dtype=bool),
        gen_seconds=np.array([s.completion.seconds for s in samples], dtype=np.float64),
        reward_seconds=np.array([s.result.seconds for s in samples], dtype=np.float64),
        reward_parts={name: _part(name, samples) for name in names},
        finish_reason=[s.completion.finish_reason for s in samples],
        data_source=[s.prompt.data_source for s in samples],
        prompt_text=[s.prompt.text for s in samples],
        response_text=[s.completion.text for s in samples],
        answer=["" if s.prompt.answer is None else str(s.prompt.answer) for s in samples],
        reason=[s.result.reason for s in samples],
    )
    batch.check()
    return batch


def _part(name: str, samples: Sequence[Finished]) -> np.ndarray:
    """One part of the rewards, float64 [N]; NaN where a sample has none."""
    values = [np.nan if s.result.invalid else s.result.parts.get(name, np.nan) for s in samples]
    return np.array(values, dtype=np.float64)
