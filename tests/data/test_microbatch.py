"""Which samples go together, and the flat tensors of one micro-batch."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import minibatches, pack, pack_samples
from tests.data.samples import batch_of


def draws(seed: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Random lengths (some over the budget), a random choice of them, ranks and budget."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 120, size=rng.integers(1, 60))
    chosen = rng.permutation(len(lengths))[: rng.integers(0, len(lengths) + 1)]
    return lengths, chosen, int(rng.integers(1, 9)), int(rng.integers(1, 300))


@pytest.mark.parametrize("seed", range(150))
def test_packing_keeps_every_promise(seed: int) -> None:
    """CFG-03: any number of samples on any number of ranks, the same number of micro-batches on each."""
    lengths, chosen, dp, budget = draws(seed)
    schedule = pack(lengths, chosen, dp, budget)
    micro = [bin_ for rank in schedule for bin_ in rank]
    assert len(schedule) == dp
    assert len({len(rank) for rank in schedule}) == 1
    assert len(schedule[0]) >= 1
    assert sorted(i for bin_ in micro for i in bin_) == sorted(chosen.tolist())
    assert all(len(bin_) == 1 or lengths[bin_].sum() <= budget for bin_ in micro if bin_)
    # A micro-batch is without samples only where there are too few of them for all.
    assert len([bin_ for bin_ in micro if bin_]) == min(len(micro), len(chosen))


@pytest.mark.parametrize("seed", range(40))
def test_packing_depends_on_neither_the_order_of_the_indices_nor_the_call(seed: int) -> None:
    lengths, chosen, dp, budget = draws(seed)
    first = pack(lengths, chosen, dp, budget)
    assert pack(lengths, chosen, dp, budget) == first
    assert pack(lengths, chosen[::-1], dp, budget) == first
    assert lengths.tolist() == draws(seed)[0].tolist()


def test_one_sample_over_the_budget_is_alone() -> None:
    assert sorted(pack(np.array([50, 3, 3]), np.arange(3), 1, 10)[0]) == [[0], [1, 2]]


def test_full_micro_batches_that_cannot_be_evened_out_stay_full() -> None:
    """3 + 3 and 2 + 2 + 2 fill two budgets of 6; dealing the longest to the lightest would need a third."""
    assert sorted(pack(np.array([3, 3, 2, 2, 2]), np.arange(5), 1, 6)[0]) == [[0, 1], [2, 3, 4]]


def test_fewer_samples_than_ranks_leaves_ranks_one_empty_micro_batch() -> None:
    assert sorted(pack(np.array([5, 6]), np.arange(2), 4, 100)) == [[[]], [[]], [[0]], [[1]]]


def test_no_samples_is_one_empty_micro_batch_a_rank() -> None:
    assert pack(np.array([5, 6]), np.array([], dtype=np.int64), 2, 100) == [[[]], [[]]]


def test_equal_samples_are_dealt_evenly() -> None:
    schedule = pack(np.full(16, 10), np.arange(16), 2, 40)
    assert [[len(micro) for micro in rank] for rank in schedule] == [[4, 4], [4, 4]]


def test_long_and_short_samples_are_mixed_so_that_ranks_carry_about_the_same() -> None:
    lengths = np.array([100, 90, 80, 70, 10, 20, 30, 40])
    schedule = pack(lengths, np.arange(8), 2, 120)
    assert [sum(int(lengths[micro].sum()) for micro in rank) for rank in schedule] == [220, 220]


def test_ranks_are_balanced_by_the_cost_of_attention_too() -> None:
    """Micro-batches of 100, 98 and twice 3 x 33 thousand tokens: by tokens alone both long ones meet on a rank."""
    lengths = np.array([100_000, 98_000] + [33_000] * 6)
    schedule = pack(lengths, np.arange(8), 2, 100_000)
    assert [sorted(len(micro) for micro in rank) for rank in schedule] == [[1, 3], [1, 3]]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_differ_by_one_full_micro_batch_at_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 100, size=64)
    load = [sum(int(lengths[m].sum()) for m in rank) for rank in pack(lengths, np.arange(64), 4, 400)]
    assert max(load) - min(load) <= 400


# Minibatches


def grouped(groups: list[int]) -> RolloutBatch:
    return batch_of([([1], [2, 3])] * len(groups), group_id=groups)


def test_minibatches_keep_groups_whole_wherever_their_samples_lie() -> None:
    batch = grouped([7, 5, 7, 9, 5, 9, 3, 3])
    steps = [step.tolist() for step in minibatches(batch, 2, epoch=0, seed=1)]
    assert steps == [[0, 1, 2, 4], [3, 5, 6, 7]]


def test_groups_that_do_not_divide_come_in_a_smaller_last_step() -> None:
    steps = [step.tolist() for step in minibatches(grouped([0, 0, 1, 1, 2, 2]), 2, epoch=0, seed=1)]
    assert steps == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("epoch", [0, 1, 2, 5])
def test_every_sample_is_in_one_step_of_each_epoch(epoch: int) -> None:
    steps = list(minibatches(grouped([g for g in range(10) for _ in range(3)]), 4, epoch=epoch, seed=3))
    assert sorted(np.concatenate(steps).tolist()) == list(range(30))
    assert [len(step) for step in steps] == [12, 12, 6]


def test_later_epochs_have_their_own_order_which_the_seed_decides() -> None:
    batch = grouped([g for g in range(20) for _ in range(2)])

    def order(epoch: int, seed: int) -> list[int]:
        return np.concatenate(list(minibatches(batch, 1, epoch, seed))).tolist()

    assert order(0, 1) == order(0, 2) == list(range(40))
    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(e, s)) for e in (0, 1, 2) for s in (1, 2)}) == 5


# The flat tensors


def test_labels_never_cross_a_sample_boundary() -> None:
    """LOSS-06: [10, 11, 12 | 20, 21] with one-token prompts predicts 11, 12 and 21; 20 is nobody's label."""
    packed = pack_samples(batch_of([([10], [11, 12]), ([20], [21])]), np.array([0, 1]))
    assert packed.tokens.tolist() == [10, 11, 12, 20, 21]
    assert packed.rows.tolist() == [0, 1, 3]
    assert packed.targets.tolist() == [11, 12, 21]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 5]
    assert packed.index.tolist() == [0, 1, 2]


def test_response_tokens_are_predicted_one_position_earlier() -> None:
    """MSK-08: prompt 3, response 2: read at positions 2 and 3, never at 4."""
    packed = pack_samples(batch_of([([1, 2, 3], [4, 5])]), np.array([0]))
    assert packed.rows.tolist() == [2, 3]
    assert packed.targets.tolist() == [4, 5]


def test_the_order_in_the_pack_changes_no_token_s_prediction() -> None:
    """LOSS-06: what is read for a response token follows its sample, wherever that lies in the pack."""
    rng = np.random.default_rng(0)
    samples = [
        (rng.integers(3, 90, rng.integers(1, 6)).tolist(), rng.integers(3, 90, rng.integers(0, 7)).tolist())
        for _ in range(9)
    ]
    batch = batch_of(samples)
    flat = [token for _, response in samples for token in response]
    origin = [
        (i, len(prompt) + k) for i, (prompt, response) in enumerate(samples) for k in range(len(response))
    ]
    for _ in range(5):
        indices = rng.permutation(9)[: rng.integers(1, 10)]
        packed = pack_samples(batch, indices)
        starts = dict(zip(indices.tolist(), packed.cu_seqlens.tolist(), strict=False))
        place = packed.index.tolist()
        assert packed.targets.tolist() == [flat[r] for r in place]
        assert packed.rows.tolist() == [starts[origin[r][0]] + origin[r][1] - 1 for r in place]
        assert [packed.tokens[row + 1] for row in packed.rows] == packed.targets.tolist()
        assert sorted(place) == [r for r, (i, _) in enumerate(origin) if i in starts]


def test_special_tokens_in_a_response_are_trained_like_others() -> None:
    """MSK-01, MSK-02: what counts follows from lengths, whatever ids padding and end of sequence have."""
    eos = pad = 2
    samples = [([9], [5, 6, 7]), ([9, eos], [5, 6, eos]), ([9], [pad, eos, 5, 6, 0])]
    packed = pack_samples(batch_of(samples), np.arange(3))
    assert packed.targets.tolist() == [5, 6, 7, 5, 6, eos, pad, eos, 5, 6, 0]
    assert len(packed.tokens) == 4 + 11


def test_a_sample_without_response_has_no_rows() -> None:
    packed = pack_samples(batch_of([([1, 2], []), ([3], [4])]), np.array([0, 1]))
    assert packed.tokens.tolist() == [1, 2, 3, 4]
    assert packed.rows.tolist() == [2]


def test_no_samples_is_one_dummy_token_that_nothing_scores() -> None:
    packed = pack_samples(batch_of([([1], [2])]), np.array([], dtype=np.int64))
    assert packed.tokens.tolist() == packed.position_ids.tolist() == [0]
    assert packed.cu_seqlens.tolist() == [0, 1]
    assert len(packed.rows) == len(packed.targets) == len(packed.index) == 0


@pytest.mark.parametrize("indices", [[], [0], [1, 0]])
def test_types_are_those_that_the_engine_takes(indices: list[int]) -> None:
    packed = pack_samples(batch_of([([1], [2]), ([3], [])]), np.array(indices, dtype=np.int64))
    kinds = {name: str(getattr(packed, name).dtype) for name in packed.__dataclass_fields__}
    assert kinds.pop("cu_seqlens") == "torch.int32"
    assert set(kinds.values()) == {"torch.int64"}
