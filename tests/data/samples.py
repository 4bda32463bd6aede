"""Finished samples by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.prompts import Prompt
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.rollout.request import Completion
from grpo_mlm.trainer.assemble import Finished, assemble


def finished(
    prompt: Sequence[int], response: Sequence[int], group: int = 0, index: int = 0, **changes: Any
) -> Finished:
    """One sample; `changes` are fields of its completion, `answer`, or `result`."""
    result = changes.pop("result", RewardResult(1.0))
    answer = changes.pop("answer", None)
    completion = {
        "group_id": group,
        "sample_index": index,
        "token_ids": np.array(response, dtype=np.int64),
        "logprobs": -np.arange(1, len(response) + 1, dtype=np.float32) / 8,
        "text": "text",
        "finish_reason": "stop",
        "weight_version": 0,
        "seconds": 0.5,
    }
    return Finished(
        group,
        Prompt(tuple(prompt), "prompt", answer, {}, "source", 0),
        Completion(**completion | changes),
        result,
    )


def batch_of(
    samples: Sequence[tuple[Sequence[int], Sequence[int]]], group_id: Sequence[int] | None = None
) -> RolloutBatch:
    """The batch of (prompt ids, response ids) pairs."""
    groups = range(len(samples)) if group_id is None else group_id
    return assemble([finished(*sample, group=group) for sample, group in zip(samples, groups, strict=True)])
