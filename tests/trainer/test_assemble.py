"""From finished samples to the step's batch."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_mlm.data.microbatch import pack_samples
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.telemetry.batch_metrics import batch_metrics
from grpo_mlm.trainer.assemble import assemble
from tests.data.samples import batch_of, finished
from tests.data.tokens import merged_bytes


def test_columns_are_laid_end_to_end_in_sample_order() -> None:
    batch = assemble(
        [
            finished(
                [1, 2, 3], [4, 5], group=7, index=0, weight_version=3, seconds=2.0, finish_reason="length"
            ),
            finished([1, 2, 3], [6], group=7, index=1, answer=12, result=RewardResult(0.5, seconds=1.5)),
            finished(
                [8],
                [],
                group=9,
                finish_reason="abort",
                result=RewardResult(0.0, invalid=True, reason="aborted"),
            ),
        ]
    )
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 6, 8]
    assert batch.cu_seqlens.tolist() == [0, 5, 9, 10]
    assert batch.prompt_lens.tolist() == [3, 3, 1]
    assert batch.response_lens.tolist() == [2, 1, 0]
    assert batch.cu_responses.tolist() == [0, 2, 3, 3]
    assert batch.rollout_logprobs.tolist() == [-1 / 8, -2 / 8, -1 / 8]
    assert batch.group_id.tolist() == [7, 7, 9]
    assert batch.sample_index.tolist() == [0, 1, 0]
    assert batch.weight_version.tolist() == [3, 0, 0]
    assert batch.gen_seconds.tolist() == [2.0, 0.5, 0.5]
    assert batch.reward_seconds.tolist() == [0.0, 1.5, 0.0]
    assert batch.finish_reason == ["length", "stop", "abort"]
    assert batch.answer == ["", "12", ""]
    assert batch.reason == ["", "", "aborted"]
    assert [batch.sample_tokens(i).tolist() for i in range(3)] == [[1, 2, 3, 4, 5], [1, 2, 3, 6], [8]]


def test_an_invalid_sample_has_no_reward_and_no_parts() -> None:
    """Whatever a failed reward left in them: invalid is not a number."""
    batch = assemble(
        [
            finished([1], [2], result=RewardResult(1, parts={"math": 1, "format": 0.5})),
            finished([1], [2], result=RewardResult(0, parts={"math": 0.0}, invalid=True, reason="timeout")),
            finished([1], [2], result=RewardResult(0, parts={"math": 0})),
        ]
    )
    assert batch.valid.tolist() == [True, False, True]
    np.testing.assert_array_equal(batch.reward, [1, np.nan, 0])
    np.testing.assert_array_equal(batch.reward_parts["math"], [1, np.nan, 0])
    np.testing.assert_array_equal(batch.reward_parts["format"], [0.5, np.nan, np.nan])
    assert {column.dtype for column in (batch.reward, *batch.reward_parts.values())} == {np.dtype("float64")}


def test_the_trainer_gets_the_sampled_ids_not_those_of_their_text() -> None:
    """MSK-03: `a` and `b` sampled one by one stay two tokens, although encoding their text gives one."""
    tokenizer = merged_bytes()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    text = tokenizer.decode([a, b])
    assert len(tokenizer(text)["input_ids"]) == 1
    batch = assemble([finished([5], [a, b], text=text)])
    assert batch.tokens.tolist() == [5, a, b]
    assert pack_samples(batch, np.array([0])).targets.tolist() == [a, b]
    assert len(batch.rollout_logprobs) == 2


@pytest.mark.parametrize("logprobs", [[], [-1.0], [-1.0, -1.0, -1.0]])
def test_ids_and_log_probs_that_do_not_pair_up_are_an_error(logprobs: list[float]) -> None:
    """MSK-03: never filled up or cut; also where two samples' mistakes would cancel."""
    other = finished([1], [4] * len(logprobs), index=1, logprobs=np.full(2, -1.0, dtype=np.float32))
    with pytest.raises(ValueError, match=f"sample 0-0: 2 token ids, {len(logprobs)} log-probs"):
        assemble([finished([1], [2, 3], logprobs=np.array(logprobs, dtype=np.float32)), other])


def test_padding_and_end_of_sequence_ids_are_ordinary_tokens() -> None:
    """MSK-01, MSK-02: lengths alone say what the response is."""
    eos = 2
    batch = batch_of([([9], [5, 6, 7]), ([9], [5, eos]), ([9, eos], [5, 6, eos, 8, 9])])
    assert batch.response_lens.tolist() == [3, 2, 5]
    assert len(batch.rollout_logprobs) == 10


def test_metrics_measure_the_tokens_that_are_trained_on() -> None:
    """MSK-11: lengths are reported of the very columns that the trainer reads."""
    batch = batch_of([([1, 2], [3, 4]), ([1, 2], [3])])
    trained = [len(pack_samples(batch, np.array([i])).rows) for i in range(2)]
    metrics = batch_metrics(batch)
    assert metrics["response_length/max"] == max(trained) == 2
    assert metrics["response_length/mean"] == 1.5


def test_a_sample_without_a_prompt_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one prompt token"):
        assemble([finished([], [1])])
