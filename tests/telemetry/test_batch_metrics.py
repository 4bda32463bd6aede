"""Metrics of a batch, against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.telemetry.batch_metrics import batch_metrics


def make_batch(rewards: list[float], lengths: list[int], finish: list[str]) -> RolloutBatch:
    n = len(rewards)
    prompt_lens = np.full(n, 2, dtype=np.int64)
    ends = np.cumsum(prompt_lens + np.array(lengths))
    valid = np.isfinite(rewards)
    return RolloutBatch(
        tokens=np.arange(ends[-1]),
        cu_seqlens=np.concatenate([[0], ends]).astype(np.int64),
        prompt_lens=prompt_lens,
        group_id=np.arange(n) // 2,
        sample_index=np.arange(n) % 2,
        weight_version=np.zeros(n, dtype=np.int64),
        rollout_logprobs=np.zeros(sum(lengths), dtype=np.float32),
        reward=np.array(rewards),
        valid=valid,
        gen_seconds=np.arange(n, dtype=np.float64),
        reward_seconds=np.zeros(n),
        reward_parts={"exact": np.array(rewards)},
        finish_reason=finish,
        data_source=["a", "a", "b", "b"][:n],
        prompt_text=[""] * n,
        response_text=[""] * n,
        answer=[""] * n,
        reason=["" if ok else "timeout: 3 s" for ok in valid],
    )


def test_mean_reward_is_the_mean_not_the_fraction_of_ones() -> None:
    """MET-03."""
    metrics = batch_metrics(make_batch([0.2, 1, 1, -0.5], [3, 1, 4, 2], ["stop"] * 4))
    assert metrics["critic/rewards/mean"] == pytest.approx(0.425)
    assert metrics["critic/rewards/max"] == 1
    assert metrics["reward/exact/mean"] == pytest.approx(0.425)
    assert metrics["reward_by_source/a"] == pytest.approx(0.6)
    assert metrics["reward_by_source/b"] == pytest.approx(0.25)


def test_invalid_samples_leave_the_mean_and_are_counted_by_kind() -> None:
    metrics = batch_metrics(make_batch([1, np.nan, 0, 1], [3, 0, 4, 2], ["stop", "abort", "length", "stop"]))
    assert metrics["critic/rewards/mean"] == pytest.approx(2 / 3)
    assert metrics["rollout/invalid_fraction"] == 0.25
    assert metrics["reward/reason/timeout"] == 1


def test_lengths_are_raw_whatever_is_trained_on() -> None:
    """AGG-05, MET: the truncated sample's four tokens count."""
    metrics = batch_metrics(make_batch([1, 0], [4, 2], ["length", "stop"]))
    assert metrics["response_length/mean"] == 3
    assert metrics["response_length/max"] == 4
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["prompt_length/mean"] == 2


def test_a_batch_without_valid_samples_has_no_reward_metric() -> None:
    batch = make_batch([np.nan, np.nan], [1, 1], ["stop", "stop"])
    metrics = batch_metrics(dataclasses.replace(batch, reward_parts={}))
    assert "critic/rewards/mean" not in metrics
    assert metrics["rollout/invalid_fraction"] == 1
