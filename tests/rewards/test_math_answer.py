"""The math reward, through the public entry. `\\boxed{...}` is put around a prediction that has none."""

from __future__ import annotations

import logging
import random
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_mlm.errors import UserError
from grpo_mlm.rewards.math_answer import quick_verdict, read_gold
from grpo_mlm.rewards.math_text import read_answer
from grpo_mlm.rewards.scorer import Scorer
from tests.rewards.conftest import Score, handled_unlocked, make_sample, make_scorer, score_all

WRONG = [  # RWD-10, and more of its kind
    ("1/2^99", "1/2^98"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    ("1/2004!", "1/2006!"),
    (r"1-\frac{1}{\mathrm{e}}", r"1+\frac{1}{\mathrm{e}}"),
    ("3*x-1*y+13=0", "3x+4y+14=0"),
    ("2", "2 2/3"),
    ("10", "4 10/3"),
    ("5", "2 3"),  # the library reads two and three side by side as five
    (r"x+\frac{1}{2^{99}}", r"x+\frac{1}{2^{98}}"),
    (r"\{\frac{1}{2^{99}}\}", r"\{\frac{1}{2^{98}}\}"),
    ("e^{-20}", "0.0"),
    ("0.0000001", "0.0000002"),
    ("10000000000000001", "10000000000000002"),
    (r"\frac{1}{1000000000}", r"\frac{1}{1000000001}"),
    ("x^2+1=0", "x^2+5=0"),  # neither has a real solution, which does not make them equal
    ("2m", "2"),
    ("2", "2m"),
    ("x=7", "y=7"),
    (r"5\text{ cm}", r"5\text{ m}"),
    ("1011_2", "1011_3"),
    ("(1,2)", "(2,1)"),
    ("[2,3)", "[2,3]"),
    ("1/3", "0.33"),
    ("2", r"2\text{x}"),
    ("3", r"\frac{1}{2}\text{ or }3"),
    (r"\sqrt{2}", "1.41"),
    (r"\text{Evelyn}", r"\text{Bob}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
]

RIGHT = [
    ("5/4", "1 1/4"),  # RWD-11
    ("8/3", "2 2/3"),
    ("8/3", r"2\frac{2}{3}"),
    ("-8/3", "-2 2/3"),
    ("2.5", "2½"),
    ("13", r"\text{13}"),
    ("73", "**73**"),
    ("-34x-45y+20z-100=0", "34x+45y-20z+100=0"),
    ("1/3", "0.333333"),
    (r"\pi", "3.14159265"),
    (r"\sqrt{2}", "1.414214"),
    (r"\sqrt{12}", r"2\sqrt3"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x^2", "x²"),
    (r"\frac{x}{2}", "0.5x"),
    (r"2\frac{\sqrt{3}}{3}", r"\frac{2\sqrt3}{3}"),
    ("1/2", r"\frac 1 2"),
    (r"1-\frac{1}{\mathrm{e}}", r"1-\frac1e"),
    ("1024", "2**10"),
    (r"\{1,2\}", "2,1"),
    (r"\text{Evelyn}", "Evelyn"),
    ("C", r"\text{(C)}"),
    ("72", r"$72$"),
]

NOTATIONS = [  # RWD-14
    ("5", r"5\text{ cm}"),
    ("5", "5 cm"),
    ("90", r"90^\circ"),
    (r"90^\circ", "90 degrees"),
    ("12.5", r"\$12.5"),
    ("1000", "1,000"),
    ("1234567", "1{,}234{,}567"),
    ("42", r"\mathrm{42}"),
    (r"\frac{1}{2}", r"\dfrac12"),
    ("-5", "\u22125"),
    ("7", "x=7"),
    ("0", "-0"),
    ("10^6", "1e6"),
    ("42", "４２"),
    (r"3\sqrt{2}", r"3\sqrt{2}\text{ cm}"),
    ("1011_2", "1011"),
]


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_answers_score_0(score_math: Score, gold: str, answer: str) -> None:
    """RWD-10."""
    result = score_math(gold, rf"\boxed{{{answer}}}")
    assert (result.value, result.invalid) == (0.0, False)


@pytest.mark.parametrize(("gold", "answer"), RIGHT + NOTATIONS)
def test_right_answers_score_1(score_math: Score, gold: str, answer: str) -> None:
    """RWD-11, RWD-14."""
    assert score_math(gold, rf"\boxed{{{answer}}}").value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer", "value"),
    [
        (r"28\%", "28 percent", 1),
        (r"28\%", "0.28", 1),
        ("0.28", "28%", 1),
        (r"28\%", "28", 0),
        ("28", r"28\%", 0),
    ],
)
def test_percent_is_a_hundredth(score_math: Score, gold: str, answer: str, value: int) -> None:
    """RWD-13, pinned: never equal to the bare number."""
    assert score_math(gold, rf"\boxed{{{answer}}}").value == value


@pytest.mark.parametrize(
    "response", [r"\boxed{42} or \boxed{43}", r"\boxed{41 \text{ or } 42}", r"\boxed{42, 43}"]
)
def test_guesses_side_by_side_score_0(score_math: Score, response: str) -> None:
    """RWD-15."""
    assert score_math("42", response).value == 0.0


def test_the_last_box_counts(score_math: Score) -> None:
    """RWD-07."""
    response = r"\boxed{5} ... wrong ... \boxed{7}"
    assert [score_math(gold, response).value for gold in ("7", "5")] == [1.0, 0.0]


@pytest.mark.parametrize(
    "response",
    ["Step 42: I do not know the answer.", r"<think>maybe \boxed{42}</think> no final answer", "42"],
)
def test_without_a_box_it_is_0_and_counted_as_no_answer(score_math: Score, response: str) -> None:
    """RWD-08, RWD-23."""
    result = score_math("42", response)
    assert (result.value, result.reason, result.parts["math/no_answer"]) == (0.0, "no_answer", 1.0)
    wrong = score_math("42", r"\boxed{43}")
    assert (wrong.reason, wrong.parts["math/no_answer"]) == ("", 0.0)


def test_require_boxed_false_takes_the_stated_answer_but_not_a_mention() -> None:
    scorer = make_scorer({"name": "math", "kwargs": {"require_boxed": False}}, num_workers=1)
    responses = [
        "#### 42",
        "The answer is **42**.",
        "42",
        "Step 42: I do not know the answer.",
        "42 is not it.\n41",
    ]
    values = [r.value for r in score_all(scorer, [make_sample(response, "42") for response in responses])]
    scorer.close()
    assert values == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_gold_comes_first(score_math: Score) -> None:
    """RWD-16: the library follows the form of its first argument."""
    assert score_math("1<x<2", r"\boxed{(1,2)}").value == 1.0
    assert score_math("(1,2)", r"\boxed{1<x<2}").value == 0.0


@pytest.mark.parametrize(
    "gold", ["see figure", r"\frac{1}{", "2 3", r"4\frac{10}{3}", r"\text{()}", "", r"\oops{"]
)
def test_an_unreadable_gold_is_invalid_and_never_pays(score_math: Score, gold: str) -> None:
    """RWD-01."""
    result = score_math(gold, r"\boxed{6}")
    assert result.invalid
    assert result.reason.startswith("unparseable_gold")


def test_golds_may_be_numbers_boxed_or_after_a_worked_solution(score_math: Score) -> None:
    for gold in (6, 6.0, "6", r"So it is \boxed{6}.", "48/8 = 6\n#### 6"):
        assert score_math(gold, r"\boxed{6}").value == 1.0


def test_unreadable_golds_are_reported_when_the_data_loads(
    math_scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    """RWD-01: a warning that names the rows; an error when no row is left."""
    prompts = [_prompt(i, gold) for i, gold in enumerate(["6", "see figure", r"\frac{x}{2}", r"x \foo y^^"])]
    with caplog.at_level(logging.WARNING):
        math_scorer.check_rows(prompts)
    assert "2 of 4 gold answers" in caplog.text
    assert "row 2 of test: 'see figure'" in caplog.text
    assert "row 4" in caplog.text
    with pytest.raises(UserError, match="1 of 1 gold answers"):
        math_scorer.check_rows(prompts[1:2])


@pytest.mark.parametrize("answer", [None, "", ["6"], {"a": 1}])
def test_a_row_without_an_answer_is_an_error_with_row_and_columns(
    math_scorer: Scorer, answer: object
) -> None:
    """RWD-20."""
    with pytest.raises(UserError, match=r"row 8 of test .*columns are \['answer', 'prompt'\]"):
        math_scorer.check_rows([_prompt(7, answer)])


def test_what_is_written_back_is_read_again() -> None:
    """Any number in any notation equals itself and no other number."""
    generator = random.Random(0)
    for _ in range(300):
        value = Fraction(generator.randint(-400, 400), generator.randint(1, 12))
        whole, rest = divmod(abs(value), 1)
        sign = "-" if value < 0 else ""
        notations = [rf"{sign}\frac{{{abs(value).numerator}}}{{{value.denominator}}}", str(value)]
        if whole and rest:
            notations += [
                f"{sign}{whole} {rest}",
                rf"{sign}{whole}\dfrac{{{rest.numerator}}}{{{rest.denominator}}}",
            ]
        for notation in notations:
            assert read_answer(notation).number == value, notation
            assert quick_verdict(read_gold(notation), read_answer(str(value))) is True
            assert quick_verdict(read_gold(notation), read_answer(str(value + Fraction(1, 1000)))) is False


def _prompt(row: int, answer: object) -> SimpleNamespace:
    columns = {"prompt": "q", "answer": answer}
    return SimpleNamespace(answer=answer, row=columns, row_index=row, data_source="test")


def test_model_text_is_never_executed(score_math: Score, tmp_path: Path) -> None:
    """SEC-01, gold and prediction side, bare and dressed up as mathematics."""
    mark = tmp_path / "mark"
    call = f"__import__('pathlib').Path('{mark}').write_text('x')"
    for text in (call, rf"\text{{{call}}}", rf"2+{call}", rf"\operatorname{{{call}}}", rf"f({call})=1"):
        assert score_math("42", rf"\boxed{{{text}}}").value == 0.0
        assert score_math(text, r"\boxed{42}").value != 1.0
    assert not mark.exists()


def test_the_grader_itself_executes_nothing(tmp_path: Path) -> None:
    """SEC-01 outside the worker, whose lock-down would hide the write."""
    mark = tmp_path / "mark"
    call = f"__import__('pathlib').Path('{mark}').write_text('x')"
    forms = (
        "{}",
        r"\text{{{}}}",
        "2+{}",
        r"\operatorname{{{}}}",
        "f({})=1",
        r"\sin({})",
        r"\sqrt{{{}}}",
        "'{}'",
    )
    texts = [form.format(call) for form in forms]
    tasks = [{"gold": "42", "prediction": t} for t in texts] + [
        {"gold": t, "prediction": "42"} for t in texts
    ]
    replies = handled_unlocked("math_compare", tasks)
    assert not mark.exists()
    assert not any(reply["equal"] for reply in replies)
