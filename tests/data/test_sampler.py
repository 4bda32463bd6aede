"""Which rows come next, and going on after a stop."""

from __future__ import annotations

from collections import Counter

import pytest

from grpo_mlm.data.sampler import PromptSampler
from grpo_mlm.errors import UserError


def steps(sampler: PromptSampler, count: int) -> list[list[tuple[int, int]]]:
    return [sampler.next() for _ in range(count)]


def rows_of(drawn: list[list[tuple[int, int]]]) -> list[int]:
    return [row for step in drawn for _, row in step]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("stop", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("batch", [2, 4])
def test_a_resumed_run_sees_the_rows_of_an_uninterrupted_one(stop: int, batch: int, shuffle: bool) -> None:
    """CKP-01: 6 rows, stopped in an epoch, at its end (step 3 of batch 2) or at the very end."""
    whole = steps(PromptSampler(6, batch, shuffle, seed=1), 9)
    first = PromptSampler(6, batch, shuffle, seed=1)
    before = steps(first, stop)
    second = PromptSampler(6, batch, shuffle, seed=1)
    second.load_state_dict(first.state_dict())
    assert second.epoch == first.epoch
    assert before + steps(second, 9 - stop) == whole


def test_a_state_taken_is_not_moved_by_later_draws() -> None:
    sampler = PromptSampler(6, 2, True, seed=1)
    steps(sampler, 2)
    state = sampler.state_dict()
    after = steps(sampler, 3)
    sampler.load_state_dict(state)
    assert steps(sampler, 3) == after


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 7, 20])
def test_every_epoch_has_every_row_once_whatever_the_batch(batch: int, shuffle: bool) -> None:
    """An epoch's last rows are filled up from the next epoch, also by a batch of several epochs."""
    rows = rows_of(steps(PromptSampler(6, batch, shuffle, seed=3), 30))
    epochs = [rows[start : start + 6] for start in range(0, len(rows) - 5, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)
    assert set(Counter(rows[: 6 * len(epochs)]).values()) == {len(epochs)}


def test_group_ids_are_never_used_twice() -> None:
    drawn = steps(PromptSampler(3, 4, True, seed=0), 10)
    assert [group for step in drawn for group, _ in step] == list(range(40))


def test_each_epoch_and_each_seed_has_its_own_order() -> None:
    def epochs(seed: int) -> list[tuple[int, ...]]:
        rows = rows_of(steps(PromptSampler(20, 20, True, seed), 5))
        return [tuple(rows[start : start + 20]) for start in range(0, 100, 20)]

    assert epochs(1) == epochs(1)
    assert len({*epochs(1), *epochs(2), tuple(range(20))}) == 11


def test_without_shuffling_rows_come_in_their_order() -> None:
    assert rows_of(steps(PromptSampler(4, 3, False, seed=9), 3)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_the_batch_size_has_no_say_in_the_order() -> None:
    assert rows_of(steps(PromptSampler(6, 2, True, 5), 6)) == rows_of(steps(PromptSampler(6, 4, True, 5), 3))


def test_the_epoch_is_that_of_the_next_row() -> None:
    sampler = PromptSampler(6, 2, True, seed=0)
    seen = []
    for _ in range(7):
        seen.append(sampler.epoch)
        sampler.next()
    assert seen == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptSampler(7, 2, True, 0), "data.train_files=6, now it is 7"),
        (PromptSampler(6, 2, False, 0), "data.shuffle=True, now it is False"),
        (PromptSampler(6, 2, True, 4), "run.seed=0, now it is 4"),
    ],
)
def test_a_state_of_another_order_of_rows_is_refused(other: PromptSampler, named: str) -> None:
    with pytest.raises(UserError, match=named):
        other.load_state_dict(PromptSampler(6, 2, True, 0).state_dict())


def test_a_sampler_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one row, got 0"):
        PromptSampler(0, 2, True, 0)
