"""Batches out of batches: some samples of one, or several end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from grpo_mlm.data.batch import TOKEN_COLUMNS, RolloutBatch


def take_samples(batch: RolloutBatch, samples: np.ndarray) -> RolloutBatch:
    """The given samples, in the given order; `samples` are indices `[M]`."""
    tokens = _tokens_of(batch.cu_seqlens, samples)
    responses = _tokens_of(batch.cu_responses, samples)
    columns: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if field.name == "tokens":
            value = value[tokens]
        elif field.name == "cu_seqlens":
            value = np.concatenate([[0], np.cumsum(batch.seq_lens[samples])])
        elif field.name in TOKEN_COLUMNS:
            value = None if value is None else value[responses]
        elif isinstance(value, dict):
            value = {name: part[samples] for name, part in value.items()}
        elif isinstance(value, list):
            value = [value[i] for i in samples]
        elif value is not None:
            value = value[samples]
        columns[field.name] = value
    return RolloutBatch(**columns)


def join_batches(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """All samples of the batches, in order. A reward part that one of them lacks is NaN there; a column that one of
    them lacks is left out."""
    if len(batches) == 1:
        return batches[0]
    columns: dict[str, Any] = {}
    for field in fields(RolloutBatch):
        values = [getattr(batch, field.name) for batch in batches]
        if field.name == "cu_seqlens":
            columns[field.name] = np.concatenate(
                [[0], np.cumsum(np.concatenate([b.seq_lens for b in batches]))]
            )
        elif field.name == "reward_parts":
            columns[field.name] = _join_parts(batches)
        elif any(value is None for value in values):
            columns[field.name] = None
        elif isinstance(values[0], list):
            columns[field.name] = [entry for value in values for entry in value]
        else:
            columns[field.name] = np.concatenate(values)
    return RolloutBatch(**columns)


def _tokens_of(offsets: np.ndarray, samples: np.ndarray) -> np.ndarray:
    pieces = [np.arange(offsets[i], offsets[i + 1]) for i in samples]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def _join_parts(batches: Sequence[RolloutBatch]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for batch in batches for name in batch.reward_parts)
    return {
        name: np.concatenate([b.reward_parts.get(name, np.full(len(b), np.nan)) for b in batches])
        for name in names
    }
