"""From pydantic's findings to sentences: the full path, the value, what was expected, the nearest valid name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from grpo_mlm.config.schema import Config
from grpo_mlm.config.suggest import did_you_mean, nearest_path
from grpo_mlm.errors import UserError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "is_instance_of": "a path",
    "list_type": "a list",
    "dict_type": "a group of keys",
    "model_type": "a group of keys",
    "too_short": "at least one entry",
}
_LIMITS = {"greater_than": ("> ", "gt"), "greater_than_equal": (">= ", "ge"), "less_than": ("< ", "lt"),
           "less_than_equal": ("<= ", "le")}  # fmt: skip
_LONGEST_VALUE = 80


def raise_problems(source: str, problems: list[str]) -> None:
    """One UserError with every problem; nothing where there is none."""
    if len(problems) == 1:
        raise UserError(f"{source}: {problems[0]}")
    if problems:
        raise UserError(f"{source}: {len(problems)} problems\n  " + "\n  ".join(problems))


def explain(error: ValidationError) -> list[str]:
    """One sentence for every finding, in the schema's order."""
    return [problem for details in error.errors() for problem in _sentences(details)]


def schema_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every dotted key of the schema with its documentation; `*` stands for a place in a list."""
    for name, field in model.model_fields.items():
        yield prefix + name, field.description or ""
        section = _section(field.annotation)
        if section is not None:
            inner = f"{prefix}{name}." if section is field.annotation else f"{prefix}{name}.*."
            yield from schema_keys(section, inner)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The group of keys that a field holds, itself or as a list of them."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _sentences(details: ErrorDetails) -> Iterator[str]:
    path, value, kind = ".".join(map(str, details["loc"])), details["input"], details["type"]
    if kind == "extra_forbidden":
        yield from (_unknown(leaf, details["loc"]) for leaf in _leaves(path, value))
    elif kind == "missing":
        yield f"{path}: missing. {_documentation(details['loc'])}"
    elif kind == "literal_error":
        names = details["ctx"]["expected"]
        known = names.replace("'", "").replace(" or ", ", ").split(", ")
        yield f"{path}: {show(value)}, expected {names}{did_you_mean(str(value), known)}"
    elif kind in _LIMITS:
        sign, key = _LIMITS[kind]
        yield f"{path}: {show(value)}, expected {sign}{details['ctx'][key]}"
    else:
        expected = _EXPECTED.get(kind)
        hint = " (in quotes)" if kind == "string_type" and not isinstance(value, dict | list) else ""
        yield f"{path}: {show(value)}, " + (f"expected {expected}{hint}" if expected else details["msg"])


def show(value: Any) -> str:
    """A value as YAML would have it, on one short line."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _leaves(path: str, value: Any) -> Iterator[str]:
    """The keys that were written below an unknown one: it is they that were misplaced."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path


def _unknown(path: str, loc: tuple[int | str, ...]) -> str:
    index = next((part for part in loc if isinstance(part, int)), 0)
    keys = [key for key, _ in schema_keys()]
    match = nearest_path(".".join("*" if part.isdecimal() else part for part in path.split(".")), keys)
    if match:
        return f"{path}: unknown key; did you mean {match.replace('*', str(index))}?"
    parent = ".".join("*" if isinstance(part, int) else str(part) for part in loc[:-1])
    names = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
    return f"{path}: unknown key; known here: {', '.join(names)}"


def _documentation(loc: tuple[int | str, ...]) -> str:
    key = ".".join("*" if isinstance(part, int) else str(part) for part in loc)
    return dict(schema_keys()).get(key, "")
