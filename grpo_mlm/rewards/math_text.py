"""Reading a mathematical answer as people write it: plain numbers exactly, the rest as clean LaTeX.

A number is read here, by rules that are few and exact, because a general parser reads too much into it
(`2 3` as 5, `28%` as 28, `1e6` as 6e). `28%` is 28/100, `2 2/3` is 8/3, `1,000` is 1000.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from grpo_mlm.rewards.math_numbers import MIXED, as_latex, read_unsigned
from grpo_mlm.rewards.math_units import split_unit, split_word_unit

MAX_CHARACTERS = 1000


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
        words = plain_words(inner)
        return Reading(words=words, source=source) if words else Reading(problem="empty")
    latex, unit = split_unit(source)
    return Reading(latex=latex, unit=unit, problem=_why_not_latex(latex), source=source)


def plain_words(text: str) -> str:
    """A text answer reduced to what is compared: no case, no blanks, no wrappers, no outer brackets."""
    bare = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    return re.sub(r"[\s{}$\\]", "", bare).casefold().strip("().")


# ---- normalising

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = {
    "\u2212": "-", "\u2044": "/", "\u00f7": "/", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u221e": r"\infty ", "\u2264": r"\le ", "\u2265": r"\ge ",
    "\u2260": r"\ne ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b1": r"\pm ",
    "\u00b0": r"^\circ", "\u221a": r"\sqrt ",
}  # fmt: skip
_SPACES = re.compile(r"\\[,;: ]|\\quad|\\qquad|~|\s+")
_CLEANING = [
    (re.compile(r"\\(?:left|right|displaystyle|textstyle|bigl?|bigr?|Bigl?|Bigr?)(?![a-zA-Z])|\\!"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\frac\s+(\d)\s+(\d)(?!\d)"), r"\\frac{\1}{\2}"),
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


# ---- numbers

_NAME = re.compile(r"(?P<name>\\?[A-Za-z]{1,12}(?:_\{?\w{1,4}\}?|'|\([A-Za-z0-9]\))?)\s*=\s*(?P<rest>[^=]+)$")
_JUXTAPOSED = re.compile(r"\d\s+\.?\d|\d\.\d*\.")


def _read_number(text: str) -> Reading | None:
    """The answer as an exact number with unit and name; None when it is not just a number."""
    source, name, unit = text, "", ""
    if match := _NAME.match(text):
        text, name = match["rest"].strip(), match["name"].casefold()
    percent = text.endswith("\\%")
    if percent:
        text = text.removesuffix("\\%").rstrip()
    else:
        text, unit = split_unit(text)
        if not unit:
            text, unit = split_word_unit(text)
    signed = re.fullmatch(r"([-+]?)\s*(\S.*)", _without_brackets(text))
    value = read_unsigned(_without_brackets(signed[2])) if signed else None
    if signed is None or value is None:
        return None
    number, inexact = value
    number = number * (-1 if signed[1] == "-" else 1) / (100 if percent else 1)
    latex = as_latex(number, inexact)
    return Reading(
        number=number,
        inexact=inexact,
        latex=f"{name}={latex}" if name else latex,
        unit=unit,
        name=name,
        source=source,
    )


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
    if _JUXTAPOSED.search(latex) or MIXED.fullmatch(latex.lstrip("+- ")):
        return "numbers side by side"
    return ""
