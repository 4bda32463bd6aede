"""Whether two answers are the same mathematics. Everything but plain numbers is judged in a grading process.

Parsing and algebra are math-verify's; its comparison of numbers, which rounds (1/2^99 would equal 1/2^98), and its
comparison of equations without solutions are replaced. The order is always gold first: the library asks whether
the prediction answers the gold, which is not symmetric.
"""

from __future__ import annotations

from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, verify

# A decimal stands for a number when it agrees to six decimals and to six significant digits.
ABSOLUTE, RELATIVE = sympy.Rational(1, 2_000_000), sympy.Rational(2, 1_000_000)
# Exact numbers are equal when sixty digits say so, with forty to spare for cancellation in between.
DIGITS, EXACT = 60, sympy.Rational(1, 10**40)

# Units are read before (math_text.py): here a trailing letter is a variable.
_LATEX = LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="last", equations=False
    ),
)


def handle(task: dict[str, str]) -> dict[str, bool]:
    """`{"gold"}` -> whether it parses; `{"gold", "prediction"}` -> also whether the prediction equals it."""
    gold = _parse(task["gold"])
    if not gold or "prediction" not in task:
        return {"gold_parses": bool(gold), "equal": False}
    prediction = _parse(task["prediction"])
    equal = bool(prediction) and verify(gold, prediction, timeout_seconds=None)
    return {"gold_parses": True, "equal": bool(equal)}


def _parse(latex: str) -> list[Any]:
    """LaTeX only: the library's other reader hands text to sympy's parse_expr, which executes it."""
    return parse(rf"\boxed{{{latex}}}", [_LATEX], fallback_mode="no_fallback", parsing_timeout=None)


def numbers_equal(a: Any, b: Any, _rounding: int = 0, _precision: int = 0) -> bool:
    """Equality of two numbers or matrices of numbers; False for anything with variables, which algebra decides."""
    if isinstance(a, sympy.MatrixBase) and isinstance(b, sympy.MatrixBase):
        return a.shape == b.shape and all(
            numbers_equal(x, y) or grader.sympy_symbolic_eq(x, y)
            for x, y in zip(a.flat(), b.flat(), strict=True)
        )
    a, b = a.doit(), b.doit()
    if a == b:
        return True
    if not (getattr(a, "is_number", False) and getattr(b, "is_number", False)):
        return False
    difference, size = abs((a - b).evalf(DIGITS)), max(abs(a.evalf(DIGITS)), abs(b.evalf(DIGITS)))
    if a.has(sympy.Float) or b.has(sympy.Float):
        return bool(difference <= ABSOLUTE and difference <= RELATIVE * size)
    return bool(difference <= EXACT * size)


def _solutions_equal(gold: Any, prediction: Any, rounding: int, precision: int) -> bool:
    """The library's comparison by solutions, where there are any: two equations without one are not the same."""
    if not sympy.solve(gold, gold.free_symbols) or not sympy.solve(prediction, prediction.free_symbols):
        return False
    return bool(_library_solutions_equal(gold, prediction, rounding, precision))


_library_solutions_equal = grader.sympy_solve_and_compare
grader.sympy_numeric_eq = numbers_equal
grader.sympy_solve_and_compare = _solutions_equal
