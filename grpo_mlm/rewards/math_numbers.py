"""Plain unsigned numbers, exactly: `1,000`, `2 2/3`, `\\frac12`, `1.5e6`. Text comes in normalised (math_text.py)."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

MAX_EXPONENT = 400

_GROUPED = re.compile(r"[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d+)?")
_DECIMAL = re.compile(r"(?P<digits>\d+(?:\.\d*)?|\.\d+)")
_SCIENTIFIC = re.compile(
    r"(?P<digits>\d+(?:\.\d*)?|\.\d+)\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*\^\s*)\s*\{?\s*(?P<power>[-+]?\d{1,4})\s*\}?"
)
_TEN_POWER = re.compile(r"10\s*\^\s*\{?\s*(?P<power>[-+]?\d{1,4})\s*\}?")
_FRACTION_TEXT = (
    r"(?:(?P<a>\d+)\s*/\s*(?P<b>\d+)|\\frac\s*(?:\{\s*(?P<c>[-+]?\d+)\s*\}|(?P<d>\d))\s*"
    r"(?:\{\s*(?P<e>[-+]?\d+)\s*\}|(?P<f>\d)))"
)
_FRACTION = re.compile(_FRACTION_TEXT)
MIXED = re.compile(r"(?P<whole>\d+)(?:\s+|(?=\\))" + _FRACTION_TEXT)


def as_latex(number: Fraction, inexact: bool) -> str:
    """The number for the parser, as a decimal where it was written as one."""
    if inexact:
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def read_unsigned(text: str) -> tuple[Fraction, bool] | None:
    """Value of an unsigned number and whether it was written as a decimal."""
    if len(text) > 2 * MAX_EXPONENT:
        return None
    if _GROUPED.fullmatch(text):
        text = re.sub("[, ]", "", text)
    if match := _DECIMAL.fullmatch(text):
        return Fraction(match["digits"]), "." in text
    if match := _SCIENTIFIC.fullmatch(text):
        return _times_ten(Fraction(match["digits"]), int(match["power"]))
    if match := _TEN_POWER.fullmatch(text):
        value = _times_ten(Fraction(1), int(match["power"]))
        return (value[0], False) if value else None
    if match := _FRACTION.fullmatch(text):
        fraction = _fraction(match)
        return None if fraction is None else (fraction, False)
    if match := MIXED.fullmatch(text):
        fraction = _fraction(match)
        # `4 10/3` is no mixed number; what it is meant to be cannot be known.
        return (int(match["whole"]) + fraction, False) if fraction is not None and 0 < fraction < 1 else None
    return None


def _times_ten(digits: Fraction, power: int) -> tuple[Fraction, bool] | None:
    return (digits * Fraction(10) ** power, True) if abs(power) <= MAX_EXPONENT else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["a"] or match["c"] or match["d"], match["b"] or match["e"] or match["f"]
    return Fraction(int(top), int(bottom)) if int(bottom) else None
