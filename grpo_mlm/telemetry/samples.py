"""Every sample of a step as one JSON line, for people and scripts."""

from __future__ import annotations

import json
import math
from pathlib import Path

from grpo_mlm.data.batch import RolloutBatch


def write_samples(batch: RolloutBatch, path: Path) -> None:
    """One line a sample: prompt, response, answer, reward with its parts, lengths, finish reason, version."""
    offsets = batch.cu_responses
    # Half a surrogate pair, which JSON rows can hold, is written as its escape.
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for i in range(len(batch)):
            advantage = (
                batch.advantages[offsets[i]]
                if batch.advantages is not None and offsets[i] < offsets[i + 1]
                else None
            )
            line = {
                "group_id": int(batch.group_id[i]),
                "sample_index": int(batch.sample_index[i]),
                "data_source": batch.data_source[i],
                "prompt": batch.prompt_text[i],
                "response": batch.response_text[i],
                "answer": batch.answer[i],
                "reward": _number(batch.reward[i]),
                "parts": {name: _number(values[i]) for name, values in batch.reward_parts.items()},
                "advantage": None if advantage is None else _number(advantage),
                "valid": bool(batch.valid[i]),
                "reason": batch.reason[i],
                "finish_reason": batch.finish_reason[i],
                "response_length": int(offsets[i + 1] - offsets[i]),
                "weight_version": int(batch.weight_version[i]),
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _number(value: float) -> float | None:
    """JSON has no NaN: an absent number is null."""
    return float(value) if math.isfinite(value) else None
