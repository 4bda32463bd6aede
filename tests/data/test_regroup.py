"""Batches taken apart and put together hold every sample's own values."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.regroup import join_batches, take_samples
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.trainer.assemble import assemble
from tests.data.samples import finished


def batch_with(parts: list[dict[str, float]], first: int) -> RolloutBatch:
    """A sample for each dict of parts; sample k has k+1 prompt and k+2 response tokens, all told apart."""
    batch = assemble(
        [
            finished(
                [100 * (first + k)] * (k + 1),
                [100 * (first + k) + 1 + t for t in range(k + 2)],
                group=first + k // 2,
                text=f"sample {first + k}",
                result=RewardResult(first + k / 10, parts=p),
            )
            for k, p in enumerate(parts)
        ]
    )
    tokens = np.arange(batch.response_lens.sum(), dtype=np.float32)
    return replace(batch, old_logprobs=first + tokens, response_mask=tokens % 2 == 0)


def assert_equal(a: RolloutBatch, b: RolloutBatch) -> None:
    for f in fields(RolloutBatch):
        np.testing.assert_equal(getattr(a, f.name), getattr(b, f.name), err_msg=f.name)


def test_taken_samples_keep_their_tokens_and_columns() -> None:
    batch = batch_with([{"a": 1.0}, {"a": 2.0}, {"a": 3.0}], first=0)
    taken = take_samples(batch, np.array([2, 0]))
    taken.check()
    assert taken.tokens.tolist() == [200, 200, 200, 201, 202, 203, 204, 0, 1, 2]
    assert taken.cu_seqlens.tolist() == [0, 7, 10]
    assert taken.response_text == ["sample 2", "sample 0"]
    assert taken.reward.tolist() == [0.2, 0.0]
    assert taken.reward_parts["a"].tolist() == [3.0, 1.0]
    # Responses of 2, 3 and 4 tokens: those of sample 2 are 5..8.
    assert taken.old_logprobs.tolist() == [5, 6, 7, 8, 0, 1]
    assert taken.response_mask.tolist() == [False, True, False, True, True, False]
    assert taken.ref_logprobs is None


def test_joined_again_it_is_the_batch_it_was() -> None:
    batch = batch_with([{"a": 1.0}, {"a": 2.0}, {"a": 3.0}], first=0)
    parts = [take_samples(batch, np.array(ids, dtype=np.int64)) for ids in ([0], [1, 2], [])]
    assert_equal(join_batches(parts), batch)
    assert join_batches([batch]) is batch


def test_a_part_that_one_batch_lacks_is_nan_there_and_a_column_is_left_out() -> None:
    a, b = batch_with([{"a": 1.0}], first=0), batch_with([{"b": 2.0}], first=5)
    joined = join_batches([a, replace(b, old_logprobs=None)])
    joined.check()
    np.testing.assert_equal(joined.reward_parts, {"a": np.array([1.0, np.nan]), "b": np.array([np.nan, 2.0])})
    assert joined.old_logprobs is None
