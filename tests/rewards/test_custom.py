"""A user's own reward: how it is found, what it may return, what its failures cost."""

from __future__ import annotations

import asyncio
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_mlm.config.functions import load_function
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.types import RewardResult, RewardSample
from tests.rewards.conftest import make_sample, make_scorer, score_all

HERE = "tests.rewards.test_custom"
release = threading.Event()  # ends the reward that hangs


def returns(sample: RewardSample, value: Any = 1.0) -> Any:
    return value


def returns_special(sample: RewardSample, what: str) -> Any:
    return {
        "numpy": np.float32(0.25),
        "numpy bool": np.bool_(True),
        "none": None,
        "array": np.ones(1),
        "result": RewardResult(0.5, {"length": 3.0}),
        "declined": RewardResult(0.0, invalid=True, reason="judge: no verdict"),
    }[what]


def length(sample: RewardSample, scale: float = 1.0) -> float:
    return scale * len(sample.response)


async def slow_async(sample: RewardSample) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"score": 0.5, "style": 0.25}


def raises(sample: RewardSample, kind: str = "ValueError") -> float:
    raise {"ValueError": ValueError, "TimeoutError": TimeoutError, "SystemExit": SystemExit}[kind]("no luck")


def hangs(sample: RewardSample) -> float:
    if sample.response == "hang":
        release.wait()
    return 1.0


meeting = threading.Barrier(8)


def meets(sample: RewardSample) -> float:
    meeting.wait(60)  # returns only when eight calls are in it at the same time
    return 1.0


def score(name: str, response: str = "abc", timeout_s: float = 60.0, **kwargs: Any) -> RewardResult:
    scorer = make_scorer({"name": f"{HERE}:{name}", "kwargs": kwargs}, timeout_s=timeout_s)
    return score_all(scorer, [make_sample(response)])[0]


@pytest.mark.parametrize(
    ("value", "expected"), [(1, 1.0), (0.5, 0.5), (True, 1.0), (-2.5, -2.5), ({"score": 0.5}, 0.5)]
)
def test_a_number_or_a_dict_with_score_is_a_verdict(value: Any, expected: float) -> None:
    result = score("returns", value=value)
    assert (result.value, result.invalid, result.parts["returns"]) == (expected, False, expected)


def test_numpy_scalars_and_reward_results_are_verdicts() -> None:
    assert score("returns_special", what="numpy").value == 0.25
    assert score("returns_special", what="numpy bool").value == 1.0
    result = score("returns_special", what="result")
    assert (result.value, result.parts) == (0.5, {"returns_special": 0.5, "returns_special/length": 3.0})
    declined = score("returns_special", what="declined")
    assert (declined.invalid, declined.reason) == (True, "judge: no verdict")


@pytest.mark.parametrize(
    "value", [[1.0], [], [1.0, 0.0], "1.0", {"reward": 1.0}, {"score": [1.0]}, {"score": None}]
)
def test_any_other_type_is_invalid_and_named(value: Any) -> None:
    """RWD-04: a list of one is no number."""
    result = score("returns", value=value)
    assert result.invalid
    assert math.isnan(result.value)
    assert result.reason.startswith(f"wrong_type: {HERE}:returns returned {type(value).__name__}")
    assert "expected one number" in result.reason


@pytest.mark.parametrize("name", ["none", "array"])
def test_none_and_arrays_are_invalid(name: str) -> None:
    """RWD-04."""
    assert score("returns_special", what=name).reason.startswith("wrong_type")


@pytest.mark.parametrize("value", [math.nan, math.inf, {"score": 1.0, "style": math.nan}])
def test_what_is_not_finite_is_invalid(value: Any) -> None:
    """RWD-04."""
    assert score("returns", value=value).reason.startswith("not_finite")


def test_kwargs_and_async_functions() -> None:
    assert score("length", response="abcd", scale=0.5).value == 2.0
    result = score("slow_async")
    assert (result.value, result.parts["slow_async/style"]) == (0.5, 0.25)


@pytest.mark.parametrize("kind", ["ValueError", "TimeoutError", "SystemExit"])
def test_a_function_that_raises_makes_the_sample_invalid(kind: str) -> None:
    result = score("raises", kind=kind)
    assert result.invalid
    assert result.reason.startswith(f"raised: {HERE}:raises")
    assert kind in result.reason


def test_one_that_hangs_costs_its_own_sample_only() -> None:
    scorer = make_scorer(f"{HERE}:hangs", timeout_s=0.5)
    samples = [make_sample("hang"), *(make_sample("ok") for _ in range(200))]
    results = score_all(scorer, samples)
    release.set()
    assert results[0].reason.startswith("timeout")
    assert results[0].seconds >= 0.5
    assert [r.value for r in results[1:]] == [1.0] * 200


def test_calls_run_side_by_side() -> None:
    """RWD-27: a slow call holds up no other."""
    results = score_all(make_scorer(f"{HERE}:meets"), [make_sample("x")] * 8)
    assert [r.value for r in results] == [1.0] * 8


def test_a_scorer_outlives_its_event_loops() -> None:
    scorer = make_scorer(f"{HERE}:length")
    for _ in range(2):
        assert sum(r.value for r in score_all(scorer, [make_sample("ab")] * 500)) == 1000.0


def test_a_function_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "math.py"  # its name must not stand in the way of anyone's `import math`
    file.write_text("import math\ndef half(sample, **kwargs):\n    return math.sqrt(0.25)\n")
    scorer = make_scorer(f"{file}:half")
    assert score_all(scorer, [make_sample("x")])[0].value == 0.5
    with pytest.raises(UserError, match=r"has no function 'hall'; it has half"):
        load_function(f"{file}:hall", "reward.functions")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (f"{HERE}:lenght", "has no function 'lenght'; it has .*length"),
        ("no_such_module_here:f", "no module 'no_such_module_here'"),
        ("json.nothing:f", r"no module 'json.nothing'"),
        ("no/such/file.py:f", "there is no file .*no/such/file.py"),
        ("just_a_name", "not of the form module:function"),
    ],
)
def test_a_function_that_is_not_there_is_an_error_that_says_what_is(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        load_function(spec, "model.maker")
    assert str(error.value).startswith("model.maker: ")


@pytest.mark.parametrize(
    ("source", "message"),
    [("import no_such_thing_x", "no_such_thing_x"), ("def f(:", "SyntaxError"), ("1/0", "ZeroDivision")],
)
def test_a_file_that_does_not_import_is_the_users_error(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=message):
        load_function(f"{tmp_path / 'mine.py'}:f", "reward.functions")


def test_a_function_that_cannot_take_the_kwargs_is_an_error_at_start() -> None:
    with pytest.raises(UserError, match=r"cannot be called with .*scales.*signature"):
        make_scorer({"name": f"{HERE}:length", "kwargs": {"scales": 2.0}})


@pytest.mark.parametrize(
    "body",
    ["return 10**400", "raise StopIteration", "return RewardResult(1.0, parts=None)", "return Unshowable()"],
)
def test_odd_results_make_the_sample_invalid_at_once(tmp_path: Path, body: str) -> None:
    source = f"""
from grpo_mlm.rewards.types import RewardResult
class Unshowable:
    def __repr__(self): raise ValueError
def f(sample):
    {body}
"""
    (tmp_path / "odd.py").write_text(source)
    result = score_all(make_scorer(f"{tmp_path}/odd.py:f"), [make_sample("abc")])[0]
    assert result.invalid
    assert result.reason.startswith("raised")


def test_a_file_that_exits_when_imported_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match="SystemExit"):
        load_function(f"{tmp_path}/script.py:f", "reward.functions")


def test_a_builtin_without_a_signature_is_the_users_error() -> None:
    with pytest.raises(UserError, match="no function of one sample"):
        make_scorer("builtins:dict")
