"""Runs reasoning-gym's verifiers. Lives in a grading process.

Some verifiers call `eval` or sympy's `parse_expr` on the answer, and both execute what a model wrote. In this
process those names stand for `safe_expression.evaluate`, which knows literals, arithmetic and a few functions.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from typing import Any

import reasoning_gym
import sympy

from grpo_mlm.rewards.safe_expression import evaluate

FUNCTIONS = {
    name: getattr(sympy, name)
    for name in (
        "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln",
        "sqrt", "Abs", "factorial", "Rational",
    )
}  # fmt: skip
CONSTANTS = {"pi": sympy.pi, "E": sympy.E, "I": sympy.I}


def handle(task: dict[str, str]) -> float:
    """`{"task", "entry" (a Python literal), "answer"}` -> the verifier's score.

    Some verifiers raise on an answer of the wrong form: that is a wrong answer, unless the gold answer fails too.
    """
    entry = ast.literal_eval(task["entry"])
    verify = _verifier(task["task"])
    try:
        return float(verify(task["answer"], entry))
    except Exception:  # anything at all, from a hundred verifiers
        verify(entry["answer"], entry)
        return 0.0


@lru_cache(maxsize=64)
def _verifier(task: str) -> Any:
    return reasoning_gym.get_score_answer_fn(task)


def python_value(text: str, *_scope: Any) -> Any:
    """In place of `eval`."""
    return evaluate(text)


def symbolic(text: str, local_dict: dict[str, Any] | None = None, **_options: Any) -> Any:
    """In place of `sympy.parse_expr`."""
    known = CONSTANTS | (local_dict or {})
    return evaluate(text, _sympy_number, lambda name: known.get(name) or sympy.Symbol(name), FUNCTIONS)


def _sympy_number(value: object) -> sympy.Number:
    """Numbers alone: handed a string, sympy's functions and `diff` would execute it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} has no place in an expression")
    return sympy.Integer(value) if isinstance(value, int) else sympy.Float(value)


def _disarm() -> None:
    sympy.parse_expr = symbolic
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith("reasoning_gym"):
            continue
        module.eval = python_value  # type: ignore[attr-defined]  # shadows the built-in one there
        parser = getattr(module, "parse_expr", None)
        if getattr(parser, "__module__", "").startswith("sympy"):
            module.parse_expr = symbolic  # type: ignore[attr-defined]


_disarm()
