"""The verifiers of reasoning-gym, every one of them, in grading processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_mlm.errors import UserError
from grpo_mlm.rewards.scorer import Scorer
from grpo_mlm.rewards.types import RewardSample
from tests.rewards.conftest import handled_unlocked, make_sample, make_scorer, score_all

TASKS = sorted(set(DATASETS) - {"composite"})
# They hand the answer to eval or parse_expr, by the library's source.
EXECUTING = [
    "string_insertion", "spiral_matrix", "binary_matrix", "simple_integration", "intermediate_integration",
    "polynomial_multiplication", "n_queens", "puzzle24", "countdown",
]  # fmt: skip


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    scorer = make_scorer("reasoning_gym", num_workers=2, timeout_s=60.0)
    yield scorer
    scorer.close()


@pytest.fixture(scope="module")
def entries() -> dict[str, dict[str, Any]]:
    return {task: reasoning_gym.create_dataset(task, size=1, seed=3)[0] for task in TASKS}


def sample(task: str, entry: dict[str, Any], response: str) -> RewardSample:
    row = {
        "prompt": entry["question"],
        "answer": entry["answer"],
        "metadata": entry["metadata"],
        "data_source": task,
    }
    return make_sample(response, entry["answer"], row=row, data_source=task)


@pytest.mark.slow
def test_every_gold_answer_scores_what_the_library_itself_gives(
    scorer: Scorer, entries: dict[str, dict[str, Any]]
) -> None:
    known = {task: e for task, e in entries.items() if isinstance(e["answer"], str)}
    results = score_all(scorer, [sample(task, e, f"\n{e['answer']}\n") for task, e in known.items()])
    for (task, entry), result in zip(known.items(), results, strict=True):
        own = reasoning_gym.get_score_answer_fn(task)(entry["answer"].strip(), entry)
        assert (task, result.invalid, result.value) == (task, False, own)
    assert len(known) > 90


@pytest.mark.slow
def test_model_text_is_executed_by_no_verifier(
    scorer: Scorer, entries: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """SEC-01, as the prediction and as the gold."""
    mark = tmp_path / "mark"
    payload = f"__import__('pathlib').Path('{mark}').write_text('x')"
    results = score_all(scorer, [sample(task, e, payload) for task, e in entries.items()])
    score_all(scorer, [sample(task, e | {"answer": payload}, "1") for task, e in entries.items()])
    assert not mark.exists()
    assert not any(r.invalid for r in results)
    assert all(r.value < 0.1 for task, r in zip(entries, results, strict=True) if task in EXECUTING)


def test_the_payload_would_have_been_executed(entries: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """SEC-01: the library does run it, so the test above can fail."""
    mark = tmp_path / "mark"
    payload = f"__import__('pathlib').Path('{mark}').write_text('x')"
    reasoning_gym.get_score_answer_fn("countdown")(payload, entries["countdown"])
    assert mark.exists()


def test_no_disguise_of_a_string_is_executed(entries: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """SEC-01: sympy's functions and `diff` execute strings that they are given. Outside the worker, whose lock-down
    would hide the write, and in a process of its own, for `gym_verify` changes the library.
    """
    mark = tmp_path / "mark"
    literal = repr(f"__import__('pathlib').Path('{mark}').write_text('x')")
    forms = ("sin({})", "sqrt({})", "log(2, {})", "Abs([{}])", "exp(({},))", "{}", "[{}]", "2 * {}", "C + {}")
    tasks = [
        {"task": task, "entry": repr(entries[task]), "answer": form.format(literal)}
        for task in EXECUTING
        for form in forms
    ]
    scores = handled_unlocked("gym_verify", tasks)
    assert not mark.exists()
    assert max(scores) < 0.1


def test_verifiers_that_read_expressions_still_do(scorer: Scorer, entries: dict[str, dict[str, Any]]) -> None:
    countdown = entries["countdown"]
    numbers = countdown["metadata"]["numbers"]
    wrong = " + ".join(map(str, numbers[:-1])) + f" - {numbers[-1]} * 1000000"
    queens = entries["n_queens"]
    as_list = repr([line.split() for line in queens["answer"].splitlines()])
    integral = {
        "question": "",
        "answer": "x**3 + C",
        "metadata": {"integrand": "3*x**2", "variable": "x", "source_dataset": "simple_integration"},
    }
    results = score_all(
        scorer,
        [
            sample("countdown", countdown, wrong),
            sample("n_queens", queens, as_list),
            sample("simple_integration", integral, "x**3 - 7 + C"),
            sample("simple_integration", integral, "x**2"),
        ],
    )
    assert [r.value for r in results] == [0.05, 0.5, 1.0, 0.0]


def test_an_answer_of_the_wrong_form_is_wrong_and_not_invalid(
    scorer: Scorer, entries: dict[str, dict[str, Any]]
) -> None:
    """prime_factorization's verifier raises ValueError on it."""
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("two", entries["prime_factorization"])
    result = score_all(scorer, [sample("prime_factorization", entries["prime_factorization"], "two")])[0]
    assert (result.value, result.invalid) == (0.0, False)


def test_only_correct_pays_nothing_for_a_wrong_answer(
    scorer: Scorer, entries: dict[str, dict[str, Any]]
) -> None:
    entry = entries["chain_sum"]
    strict = make_scorer(
        {"name": "reasoning_gym", "kwargs": {"only_correct": True}}, num_workers=1, timeout_s=60.0
    )
    responses = [entry["answer"], f"{entry['answer']} or so", "no"]
    samples = [sample("chain_sum", entry, text) for text in responses]
    partial = [r.value for r in score_all(scorer, samples)]
    assert partial[0] == 1.0
    assert 0 < partial[1] < 1
    assert [r.value for r in score_all(strict, samples)] == [1.0, 0.0, 0.0]
    strict.close()


def test_an_endless_expression_is_invalid_in_time() -> None:
    """RWD-02, for this library."""
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=3)[0]
    scorer = make_scorer("reasoning_gym", num_workers=1, timeout_s=1.0)
    endless, right = score_all(
        scorer, [sample("countdown", entry, "9**9**9**9"), sample("countdown", entry, entry["answer"])]
    )
    scorer.close()
    assert endless.reason.startswith("timeout")
    assert right.value == 1.0


@pytest.mark.parametrize(
    "row", [{"prompt": "q", "answer": "1"}, {"prompt": "q", "metadata": {"source_dataset": "chain_some"}}]
)
def test_a_row_of_no_task_is_an_error_at_start(scorer: Scorer, row: dict[str, Any]) -> None:
    """RWD-20."""
    prompt = SimpleNamespace(answer="1", row=row, row_index=4, data_source="mine")
    with pytest.raises(UserError, match="row 5 of mine"):
        scorer.check_rows([prompt])


def test_the_packages_own_code_executes_no_text() -> None:
    """SEC-01: no eval, exec, pickle or sympify of anything in the rewards."""
    folder = Path(__file__).parents[2] / "grpo_mlm" / "rewards"
    forbidden = {"eval", "exec", "compile", "sympify", "parse_expr"}
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = (
                    node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                )
                of = getattr(getattr(node.func, "value", None), "id", "")
                assert called not in forbidden or of == "re", f"{file.name}:{node.lineno} calls {called}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "")}
                assert not names & {"pickle", "marshal", "shelve"}, f"{file.name}:{node.lineno}"
