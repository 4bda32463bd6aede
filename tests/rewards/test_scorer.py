"""Several rewards into one number, and everything that can be wrong before the first step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_mlm.errors import UserError
from grpo_mlm.rewards.types import RewardSample
from tests.rewards.conftest import make_sample, make_scorer, score_all

HERE = "tests.rewards.test_scorer"


def length(sample: RewardSample) -> float:
    return float(len(sample.response))


def broken(sample: RewardSample) -> float:
    raise KeyError("column")


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted() -> None:
    """RWD-25."""
    scorer = make_scorer({"name": "exact_match", "weight": 2.0}, {"name": f"{HERE}:length", "weight": -0.5})
    result = score_all(scorer, [make_sample("abc", "abc")])[0]
    assert result.value == 2.0 * 1.0 - 0.5 * 3.0
    assert (result.parts["exact_match"], result.parts["length"]) == (1.0, 3.0)


@pytest.mark.parametrize("index", [0, 1])
def test_every_weight_has_an_effect(index: int) -> None:
    """RWD-25: 0 and not 0 differ, for each."""
    values = []
    for weight in (0.0, 0.75):
        weights = [1.0, 1.0]
        weights[index] = weight
        scorer = make_scorer(
            {"name": "exact_match", "weight": weights[0]}, {"name": f"{HERE}:length", "weight": weights[1]}
        )
        values.append(score_all(scorer, [make_sample("a", "a")])[0].value)
    assert values == [1.0, 1.75]


def test_one_failed_reward_makes_the_sample_invalid_but_shows_the_others() -> None:
    result = score_all(make_scorer("exact_match", f"{HERE}:broken"), [make_sample("a", "a")])[0]
    assert result.invalid
    assert math.isnan(result.value)
    assert result.parts["exact_match"] == 1.0
    assert math.isnan(result.parts["broken"])
    assert result.reason.startswith("raised: ")


def test_an_aborted_sample_is_invalid_and_the_rest_of_the_batch_is_scored() -> None:
    """RWD-05."""
    samples = [make_sample("a", "a"), make_sample("", "a", finish_reason="abort"), make_sample("b", "a")]
    results = score_all(make_scorer("exact_match"), samples)
    assert [r.invalid for r in results] == [False, True, False]
    assert [results[0].value, results[2].value] == [1.0, 0.0]
    assert results[1].reason.startswith("aborted")


def test_a_boxed_answer_counts_under_every_registered_reward() -> None:
    """RWD-18."""
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)[0]
    for name in ("exact_match", "math", "reasoning_gym"):
        scorer = make_scorer(name, num_workers=1, timeout_s=60.0)
        row = {"metadata": entry["metadata"]}
        sample = make_sample(rf"Answer: \boxed{{{entry['answer']}}}", entry["answer"], row=row)
        assert score_all(scorer, [sample])[0].value == 1.0
        scorer.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            {"name": "exactmatch"},
            r"no reward 'exactmatch'; did you mean exact_match\? Known are exact_match, math",
        ),
        ({"name": "math", "kwargs": {"require_box": True}}, "require_box=True.*known kwargs: require_boxed"),
        ({"name": "math", "kwargs": {"require_boxed": "yes"}}, "require_boxed='yes'"),
        ({"name": "exact_match", "kwargs": {"pattern": "("}}, "pattern='\\('"),
        ({"name": "exact_match", "kwargs": {"pattern": "a(b)(c)"}}, "has 2 groups"),
        ({"name": "exact_match", "weight": 0.0}, "every weight is 0"),
    ],
)
def test_a_wrong_reward_is_an_error_at_start(function: dict[str, Any], message: str) -> None:
    """RWD-20."""
    with pytest.raises(UserError, match=message):
        make_scorer(function)


def test_the_same_reward_twice_is_an_error_and_two_of_one_name_are_told_apart() -> None:
    with pytest.raises(UserError, match="'exact_match' is listed twice"):
        make_scorer("exact_match", "exact_match")
    scorer = make_scorer(f"{HERE}:length", "tests.rewards.test_custom:length")
    parts = score_all(scorer, [make_sample("abc")])[0].parts
    assert parts == {f"{HERE}:length": 3.0, "tests.rewards.test_custom:length": 3.0}


def test_exact_match_compares_the_stripped_answer() -> None:
    responses = [" 7 \n", r"so \boxed{7}", "the answer is 7", "77", ""]
    values = [r.value for r in score_all(make_scorer("exact_match"), [make_sample(t, 7) for t in responses])]
    assert values == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_match_by_pattern_takes_the_last_match() -> None:
    scorer = make_scorer(
        {"name": "exact_match", "kwargs": {"pattern": "<answer>(.*?)</answer>", "ignore_case": True}}
    )
    responses = ["<answer>no</answer> <answer>\nYES </answer>", "yes", "<answer>no</answer>"]
    results = score_all(scorer, [make_sample(t, "Yes") for t in responses])
    assert [r.value for r in results] == [1.0, 0.0, 0.0]
    assert [r.reason for r in results] == ["", "no_answer", ""]
    assert results[1].parts["exact_match/no_answer"] == 1.0


def test_rows_without_answers_are_an_error_before_the_first_step() -> None:
    """RWD-20."""
    good = SimpleNamespace(answer="1", row={"prompt": "q", "answer": "1"}, row_index=0, data_source="s")
    bad = SimpleNamespace(answer=None, row={"prompt": "q", "solution": "1"}, row_index=5, data_source="s")
    scorer = make_scorer("exact_match")
    scorer.check_rows([good])
    with pytest.raises(UserError, match=r"row 6 of s .*\['prompt', 'solution'\]"):
        scorer.check_rows([good, bad])
