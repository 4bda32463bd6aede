"""The ragged batch: consistent, and the same after a file."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.types import RewardResult
from grpo_mlm.trainer.assemble import assemble
from tests.data.samples import batch_of, finished


def full_batch() -> RolloutBatch:
    """Every column set; texts of all kinds, a reward that failed, a response without tokens."""
    batch = assemble(
        [
            finished([1, 2], [3, 4], group=5, text="\u6f22 \ud800 \x00 \n", answer={"a": [1]}),
            finished(
                [1], [], finish_reason="abort", result=RewardResult(0.0, invalid=True, reason="timeout")
            ),
            finished([1], [2], result=RewardResult(0.1, parts={"my.rewards:f/g": 0.1, "math": 1 / 3})),
        ]
    )
    return replace(batch, old_logprobs=np.float32([1, 2, 3]), advantages=np.float32([0.1, -0.0, np.nan]))


def test_a_saved_batch_loads_as_it_was(tmp_path: Path) -> None:
    batch = full_batch()
    batch.save(tmp_path / "new" / "step_1.safetensors")
    loaded = RolloutBatch.load(tmp_path / "new" / "step_1.safetensors")
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / "step_1.safetensors"]
    for f in fields(RolloutBatch):
        before, after = getattr(batch, f.name), getattr(loaded, f.name)
        if isinstance(before, np.ndarray):
            assert (after.dtype, after.tobytes()) == (before.dtype, before.tobytes()), f.name
        elif isinstance(before, dict):
            assert after.keys() == before.keys()
            assert all(after[k].tobytes() == before[k].tobytes() for k in before)
        else:
            assert after == before, f.name
    assert loaded.ref_logprobs is None


def test_texts_of_any_length_are_saved(tmp_path: Path) -> None:
    """A safetensors file's own header ends at 100 MB, which the texts of one large step pass."""
    batch = batch_of([([1], [2])])
    batch.response_text = ["x" * 100_000_001]
    batch.save(tmp_path / "a.safetensors")
    assert RolloutBatch.load(tmp_path / "a.safetensors").response_text == batch.response_text


def test_a_batch_can_be_saved_over_itself(tmp_path: Path) -> None:
    for response in ([2], [3, 4]):
        batch_of([([1], response)]).save(tmp_path / "a.safetensors")
    assert RolloutBatch.load(tmp_path / "a.safetensors").tokens.tolist() == [1, 3, 4]


def test_damaged_and_foreign_files_are_named(tmp_path: Path) -> None:
    full_batch().save(tmp_path / "good.safetensors")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.safetensors").write_bytes(b"hello")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    save_file({"weight": np.zeros(2)}, tmp_path / "model.safetensors")
    for name in ("cut", "text", "empty", "model", "missing"):
        path = tmp_path / f"{name}.safetensors"
        with pytest.raises(UserError, match=f"{path} is not a saved rollout batch"):
            RolloutBatch.load(path)


def test_a_saved_batch_that_does_not_add_up_is_refused(tmp_path: Path) -> None:
    batch = full_batch()
    batch.rollout_logprobs = batch.rollout_logprobs[:-1]
    batch.save(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match="rollout_logprobs has 2 values for 3 response tokens"):
        RolloutBatch.load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokens": np.arange(3)}, "do not span 3 tokens"),
        ({"cu_seqlens": np.array([1, 2, 5])}, "do not span"),
        ({"cu_seqlens": np.array([0, 3, 5, 5])}, "do not span"),
        ({"prompt_lens": np.array([0, 1])}, "at least one prompt token"),
        ({"prompt_lens": np.array([4, 1])}, "negative response length"),
        (
            {"rollout_logprobs": np.zeros(4, np.float32)},
            "rollout_logprobs has 4 values for 3 response tokens",
        ),
        ({"old_logprobs": np.zeros(2, np.float32)}, "old_logprobs has 2 values for 3"),
        ({"advantages": np.zeros(2, np.float32)}, "advantages has 2 values for 3"),
        ({"reward": np.zeros(3)}, "reward has 3 entries for 2 samples"),
        ({"reason": []}, "reason has 0 entries for 2 samples"),
        ({"reward_parts": {"math": np.zeros(1)}}, "reward part math has 1 entries for 2 samples"),
    ],
)
def test_columns_of_different_lengths_are_an_error(changes: dict[str, Any], says: str) -> None:
    """MSK-03"""
    batch = batch_of([([1], [2, 3]), ([4], [5])])
    batch.check()
    with pytest.raises(ValueError, match=says):
        replace(batch, **changes).check()


def test_training_columns_are_those_that_sampling_did_not_make() -> None:
    batch = full_batch()
    before = batch.without_training_columns()
    assert (before.old_logprobs, before.ref_logprobs, before.advantages) == (None, None, None)
    assert before.rollout_logprobs is batch.rollout_logprobs
    assert batch.old_logprobs is not None
