"""Units of answers: `5\\text{ cm}`, `90^\\circ`, `\\$12.50`, `1011_2`. Text comes in normalised (math_text.py)."""

from __future__ import annotations

import re

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


def split_unit(text: str) -> tuple[str, str]:
    """The expression and its unit, where the unit is marked as one: `\\text{cm}`, degrees, a currency sign, a base."""
    if match := _CURRENCY.match(text):
        return match["sign"] + match["rest"], match["unit"].lstrip("\\")
    if match := _DEGREES.match(text):
        return match["rest"], "°" + re.sub(r"[^CF]", "", match["scale"] or "")
    if (match := _TEXT_UNIT.match(text)) and _may_be_unit(match["unit"]):
        return match["rest"], _unit_name(match["unit"], match["power"])
    if match := _BASE.match(text):
        return match["rest"], f"base {match['base']}"
    return text, ""


def split_word_unit(text: str) -> tuple[str, str]:
    """A unit as a bare word; only for what turns out to be a number, since letters may be variables."""
    match = _WORD_UNIT.match(text)
    words = match["unit"].lower().split() if match else []
    if match and all((w in _UNITS and w not in _VARIABLES) or w in _NOUNS for w in words):
        return match["rest"], _unit_name(match["unit"], match["power"])
    return text, ""


def _may_be_unit(words: str) -> bool:
    """Any noun in upright letters; a single letter only if it is a unit, for it may be a variable."""
    name = words.strip(" .")
    return not _NOT_UNITS.search(words) and (len(name) > 1 or name in _UNITS)


def _unit_name(unit: str, power: str | None) -> str:
    name = re.sub(r"[\s.]", "", unit).casefold()
    return _UNITS.get(name, name) + re.sub(r"\D", "", power or "")


def units_differ(a: str, b: str) -> bool:
    """Whether both units are known and not the same."""
    known = all(u.rstrip("0123456789") in _UNITS or u.startswith("base ") for u in (a, b))
    return known and a != b
