"""A config file plus overrides becomes a checked `Config`; a `Config` becomes a file again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_mlm.config.check import broken_rules
from grpo_mlm.config.explain import explain, raise_problems
from grpo_mlm.config.schema import Config
from grpo_mlm.config.yaml_text import format_yaml, parse_yaml
from grpo_mlm.errors import UserError


def load_config(path: Path | str, overrides: Iterable[str] = ()) -> Config:
    """The config in the YAML file, its `base` under it and `a.b.c=value` overrides over it, checked.

    Groups of keys merge key by key; anything else, lists too, is replaced. The value of an override is YAML.
    UserError lists every problem: with full path, value, what was expected, and the nearest valid name.
    """
    path = Path(os.path.expanduser(path))
    tree: Any = _read(path, ())
    problems = []
    for text in overrides:
        try:
            tree = _override(tree, text)
        except UserError as error:
            problems.append(str(error))
    raise_problems("command line", problems)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise_problems(str(path), explain(error))
        raise
    raise_problems(str(path), broken_rules(config))
    return config


def dump_config(config: Config) -> str:
    """The whole config, defaults included, as YAML that `load_config` reads back equal."""
    return format_yaml(config.model_dump(mode="json"))


def _read(path: Path, readers: tuple[Path, ...]) -> dict[str, Any]:
    """The file's keys over those of its `base`, which is named relative to the file and may have one itself."""
    try:
        here = path.resolve()
    except (RuntimeError, ValueError) as error:  # links in a circle; a NUL in the name
        raise UserError(f"{str(path)!r}: not a path to a config file: {error}") from error
    chain = (*readers, here)
    if here in readers:
        raise UserError("base: files include each other: " + " -> ".join(map(str, chain)))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        wanted_by = f" (base of {readers[-1]})" if readers else ""
        raise UserError(f"{path}{wanted_by}: cannot read the config file: {reason}") from error
    tree = parse_yaml(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected groups of keys, found a {type(tree).__name__}")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str):
        raise UserError(f"{path}: base: {base!r}, expected the name of one file")
    return _merge(_read(path.parent / os.path.expanduser(base), chain), tree)


def _merge(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = _merge(below, value)
        merged[key] = value
    return merged


def _override(tree: Any, text: str) -> Any:
    """The tree with one `a.b.c=value` applied; a list takes a position as key."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{text!r}: expected key=value, for example actor.optim.lr=1e-6")
    return _assign(tree, key.split("."), parse_yaml(value, f"{key}={value}"), key)


def _assign(node: Any, keys: list[str], value: Any, full: str) -> Any:
    if not keys:
        return value
    key, *rest = keys
    if isinstance(node, list):
        if not key.isdecimal() or int(key) >= len(node):
            raise UserError(f"{full}: {key!r} is not a position in a list of {len(node)}")
        place = int(key)
        return [*node[:place], _assign(node[place], rest, value, full), *node[place + 1 :]]
    if node is not None and not isinstance(node, dict):
        raise UserError(f"{full}: there is no key {key!r} below the value {node!r}")
    below = node or {}
    return {**below, key: _assign(below.get(key), rest, value, full)}
