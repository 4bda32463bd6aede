"""Reading a mathematical answer as people write it: plain numbers exactly, the rest as clean LaTeX.

A number is read here, by rules that are few and exact, because a general parser reads too much into it
(`2 3` as 5, `28%` as 28, `1e6` as 6e). `28%` is 28/100, `2 2/3` is 8/3, `1,000` is 1000.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_CHARACTERS = 1000
MAX_EXPONENT = 400


@dataclass(frozen=True)
class Reading:
    """One answer as read. Exactly one of `number`, `words`, `latex` is set, or `problem` says why none is."""

    number: Fraction | None = None
    inexact: bool = False  # the number was written with a decimal point or an exponent
    words: str | None = None  # a text answer: `\\text{Evelyn}`, `\\text{(C)}`
    latex: str = ""  # for the parser
    unit: str = ""  # `cm`, `°`, `$`; `base 2`
    name: str = ""  # `x` of `x = 7`
    problem: str = ""
    source: str = ""  # the normalised text


def read_answer(text: str) -> Reading:
    """Read one answer, without its box."""
    if len(text) > MAX_CHARACTERS:
        return Reading(problem=f"longer than {MAX_CHARACTERS} characters")
    source = normalise(text)
    if not source:
        return Reading(problem="empty")
    inner = _whole_text(source)
    value = _read_number(source if inner is None else inner)
    if value is not None:
        return value
    if inner is not None:
        return Reading(words=plain_words(inner), source=source)
    latex, unit = _split_unit(source)
    return Reading(latex=latex, unit=unit, problem=_why_not_latex(latex), source=source)


def plain_words(text: str) -> str:
    """A text answer reduced to what is compared: no case, no blanks, no wrappers, no outer brackets."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s{}$\\]", "", bare).casefold().strip("().")


# ---- normalising

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = {
    "\u2212": "-", "\u2013": "-", "\u2044": "/", "\u00f7": "/", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u00b0": r"^\circ", "\u221a": r"\sqrt ",
}  # fmt: skip
_SPACES = re.compile(r"\\[,;: ]|\\quad|\\qquad|~|\s+")
_CLEANING = [
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:mathrm|mathbf|mathit|textrm|textbf|textit|textnormal|mbox|operatorname)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\text\s*\{\s*([eid])\s*\}"), r"\1"),  # upright e, i, d
    (re.compile(r"\\text\s*\{\s*\}"), ""),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"(?<!\\)\$|\\[()\[\]]|`|^\s*\*\*|\*\*\s*$"), ""),  # mathematics and bold delimiters
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent(?:age)?\s*\}|\b(?:percent(?:age)?|pct)\b)"), r"\\%"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])|\{?\\degree\}?)|\\degree(?![a-zA-Z])"), r"^\\circ"),
]  # fmt: skip


def normalise(text: str) -> str:
    """One spelling for characters, spaces, fractions, percent and degrees; no delimiters, no final stop."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+", lambda m: f"^{{{m[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: f"_{{{m[0].translate(_SUBSCRIPTS)}}}", text)
    # `2½` is two and a half: keep the fraction apart from the digit before it.
    text = "".join(f" {c}" if unicodedata.decomposition(c).startswith("<fraction>") else c for c in text)
    text = "".join(_SYMBOLS.get(c, c) for c in unicodedata.normalize("NFKC", text))
    text = _without_final_stop(text)
    for pattern, replacement in _CLEANING:
        text = pattern.sub(replacement, text)
    return _without_final_stop(_SPACES.sub(" ", text))


def _without_final_stop(text: str) -> str:
    return re.sub(r"(?<!\\)[.,;:\s]+$", "", text.strip())


# ---- units

# Spellings of one unit. Two answers in different units of this table differ; any other word is no reason to.
_UNITS = {
    spelling: spellings.split()[0]
    for spellings in (
        "mm millimeter millimeters", "cm centimeter centimeters centimetres", "m meter meters metre metres",
        "km kilometer kilometers kilometres", "in inch inches", "ft foot feet", "yd yard yards", "mi mile miles",
        "mg", "g gram grams", "kg kilogram kilograms", "lb lbs pound pounds", "oz ounce ounces", "ml", "l liter liters",
        "s sec second seconds", "min minute minutes", "h hr hour hours", "d day days", "week weeks", "month months",
        "year years", "° deg degree degrees", "°C", "°F", "$ dollar dollars usd", "¢ cent cents", "€ euro euros",
        "£", "mph", "kmph",
    )
    for spelling in spellings.split()
}  # fmt: skip
_NOUNS = {
    "unit",
    "units",
    "square",
    "cubic",
    "sq",
    "cu",
    "people",
    "students",
    "apples",
    "points",
    "times",
    "cups",
}
_VARIABLES = {"m", "g", "l", "s", "h", "d"}  # as bare letters these are variables
_NOT_UNITS = re.compile(
    r"\b(?:or|and|not|no|to|if|is|for|at|than|least|most|more|less|about)\b", re.IGNORECASE
)
_TEXT_UNIT = re.compile(
    r"(?P<rest>.*\S)\s*(?:\\text\s*\{(?P<unit>[A-Za-z ./]+)\}(?P<power>\s*\^\s*\{?\s*\d\s*\}?)?)$"
)
_DEGREES = re.compile(r"(?P<rest>.*\S)\s*\^\\circ\s*(?P<scale>(?:\\text\s*\{)?[CF]\}?)?$")
_WORD_UNIT = re.compile(
    r"(?P<rest>.*[\d}])\s+(?P<unit>[A-Za-z]+(?: [A-Za-z]+)?)(?P<power>\s*\^\s*\{?\d\}?)?$"
)
_CURRENCY = re.compile(r"(?P<sign>[-+]?)\s*(?P<unit>\\\$|[€£¥₹])\s*(?P<rest>[-+]?[\d.].*)$")
_BASE = re.compile(r"(?P<rest>\d+)\s*_\s*\{?\s*(?P<base>\d+)\s*\}?$")


def _split_unit(text: str) -> tuple[str, str]:
    """The expression and its unit, where the unit is marked as one: `\\text{cm}`, degrees, a currency sign, a base."""
    if match := _CURRENCY.match(text):
        return match["sign"] + match["rest"], match["unit"].lstrip("\\")
    if match := _DEGREES.match(text):
        return match["rest"], "°" + re.sub(r"[^CF]", "", match["scale"] or "")
    if (match := _TEXT_UNIT.match(text)) and not _NOT_UNITS.search(match["unit"]):
        return match["rest"], _unit_name(match["unit"], match["power"])
    if match := _BASE.match(text):
        return match["rest"], f"base {match['base']}"
    return text, ""


def _split_word_unit(text: str) -> tuple[str, str]:
    """A unit as a bare word; only for what turns out to be a number, since letters may be variables."""
    match = _WORD_UNIT.match(text)
    words = match["unit"].lower().split() if match else []
    if match and all((w in _UNITS and w not in _VARIABLES) or w in _NOUNS for w in words):
        return match["rest"], _unit_name(match["unit"], match["power"])
    return text, ""


def _unit_name(unit: str, power: str | None) -> str:
    name = re.sub(r"[\s.]", "", unit).casefold()
    return _UNITS.get(name, name) + re.sub(r"\D", "", power or "")


def units_differ(a: str, b: str) -> bool:
    """Whether both units are known and not the same."""
    known = all(u.rstrip("0123456789") in _UNITS or u.startswith("base ") for u in (a, b))
    return known and a != b


# ---- numbers

_NAME = re.compile(r"(?P<name>\\?[A-Za-z]{1,12}(?:_\{?\w{1,4}\}?|'|\([A-Za-z0-9]\))?)\s*=\s*(?P<rest>[^=]+)$")
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
_MIXED = re.compile(r"(?P<whole>\d+)(?:\s+|(?=\\))" + _FRACTION_TEXT)
_JUXTAPOSED = re.compile(r"\d\s+\.?\d|\d\s*\\frac|\d\.\d*\.")


def _read_number(text: str) -> Reading | None:
    """The answer as an exact number with unit and name; None when it is not just a number."""
    source, name, unit = text, "", ""
    if match := _NAME.match(text):
        text, name = match["rest"].strip(), match["name"].casefold()
    percent = text.endswith("\\%")
    if percent:
        text = text.removesuffix("\\%").rstrip()
    else:
        text, unit = _split_unit(text)
        if not unit:
            text, unit = _split_word_unit(text)
    signed = re.fullmatch(r"([-+]?)\s*(\S.*)", _without_brackets(text))
    value = _unsigned(_without_brackets(signed[2])) if signed else None
    if signed is None or value is None:
        return None
    number, inexact = value
    number = number * (-1 if signed[1] == "-" else 1) / (100 if percent else 1)
    latex = _as_latex(number, inexact)
    return Reading(
        number=number,
        inexact=inexact,
        latex=f"{name}={latex}" if name else latex,
        unit=unit,
        name=name,
        source=source,
    )


def _as_latex(number: Fraction, inexact: bool) -> str:
    if inexact:
        return f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
    return str(number) if number.denominator == 1 else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


def _unsigned(text: str) -> tuple[Fraction, bool] | None:
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
    if match := _MIXED.fullmatch(text):
        fraction = _fraction(match)
        # `4 10/3` is no mixed number; what it is meant to be cannot be known.
        return (int(match["whole"]) + fraction, False) if fraction is not None and 0 < fraction < 1 else None
    return None


def _times_ten(digits: Fraction, power: int) -> tuple[Fraction, bool] | None:
    return (digits * Fraction(10) ** power, True) if abs(power) <= MAX_EXPONENT else None


def _fraction(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["a"] or match["c"] or match["d"], match["b"] or match["e"] or match["f"]
    return Fraction(int(top), int(bottom)) if int(bottom) else None


def _without_brackets(text: str) -> str:
    match = re.fullmatch(r"\{([^{}]*)\}|\(([-+]?[\d./]+)\)", text)
    return (match[1] or match[2] or "").strip() if match else text


# ---- expressions and words

_TEXT_ONLY = re.compile(r"\\text\s*\{(?P<inner>[^{}]*)\}")
_KNOWN_WORDS = {
    "infinity",
    "arcsin",
    "arccos",
    "arctan",
    "cosec",
    "binom",
    "matrix",
    "pmatrix",
    "bmatrix",
    "vmatrix",
}
_ALLOWED = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>(){}\[\]|,.:;!'&\\%]*")


def _whole_text(text: str) -> str | None:
    match = _TEXT_ONLY.fullmatch(text)
    return match["inner"].strip() if match else None


def _why_not_latex(latex: str) -> str:
    """Empty when the parser may try: nothing but mathematics, braces in pairs, no two numbers side by side."""
    if not _ALLOWED.fullmatch(latex) or "__" in latex:
        return "characters that are not mathematics"
    if len(re.findall(r"(?<!\\)\{", latex)) != len(re.findall(r"(?<!\\)\}", latex)):
        return "unbalanced braces"
    bare = re.sub(r"\\[A-Za-z]+", " ", _TEXT_ONLY.sub(" ", latex))
    words = [w for w in re.findall(r"[A-Za-z]{5,}", bare) if w not in _KNOWN_WORDS]
    if words:
        return f"words: {words[0]}"
    if _JUXTAPOSED.search(latex):
        return "numbers side by side"
    return ""
