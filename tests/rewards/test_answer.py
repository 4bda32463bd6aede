"""What the answer of a response is."""

from __future__ import annotations

import pytest

from grpo_mlm.rewards.answer import answer_text, boxed_answer, marked_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{5} ... wrong ... \boxed{7}", "7"),  # RWD-07
        (r"\boxed{840} and so, once more, \boxed{840}", "840"),  # RWD-11
        (r"\boxed{840} \boxed{840}", "840"),
        (r"\boxed{42} or \boxed{43}", "42, 43"),  # RWD-15
        (r"$\boxed{42}$, or perhaps $\boxed{43}$", "42, 43"),
        (r"It is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed{5} and then \boxed{7", None),  # cut off inside the last box
        ("Step 42: I do not know the answer.", None),  # RWD-08
        (r"<think>maybe \boxed{42}</think> no final answer", None),  # RWD-08
        (r"maybe \boxed{41}</think> it is \boxed{42}", "42"),  # the opening tag stood in the prompt
        (r"\boxed{42} <think>or \boxed{43}", "42"),
        ("", None),
    ],
)
def test_the_last_box_outside_the_thinking_is_the_answer(response: str, answer: str | None) -> None:
    assert boxed_answer(response) == answer


def test_without_a_box_the_whole_final_text_is_the_answer_text() -> None:
    assert answer_text("<think>1 + 1</think>\n 2\n") == "2"
    assert answer_text(r"so \boxed{2}.") == "2"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Adding up.\nThe answer is 42.\n", "42."),
        ("6 * 7\n#### 42", "42"),
        ("first\n42", "42"),
        ("Answer:\n42", "42"),
        ("The answer is 41. No, the answer is: 42", "42"),
        ("answer is 6 * 7 #### 42", "42"),
        ("I cannot answer 42\nSorry", "Sorry"),
        (r"the answer is 3, no: \boxed{4}", "4"),
        ("", None),
    ],
)
def test_marked_answers(response: str, answer: str | None) -> None:
    assert marked_answer(response) == answer


def test_hostile_nesting_is_read_in_a_moment() -> None:
    depth = 50_000
    assert boxed_answer(r"\boxed{" * depth) is None
    assert boxed_answer(r"\boxed{" * depth + "5" + "}" * depth) != "5"
    assert boxed_answer("or " * depth + r"\boxed{5}") == "5"
    assert marked_answer("the answer" + " " * depth + "\nis answer is" * depth + "\n2") == "2"
