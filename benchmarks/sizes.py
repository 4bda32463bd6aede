"""Parses `key=number,...`, the way in which benchmarks take parallel sizes."""

from __future__ import annotations

from grpo_mlm.errors import UserError


def parse_sizes(text: str, option: str, defaults: dict[str, int]) -> dict[str, int]:
    """`defaults` with what the text sets. UserError: an unknown key, a key given twice, no positive whole number."""
    sizes: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, number = part.partition("=")
        if key not in defaults or not equals:
            raise UserError(
                f"{option} {text!r}: {part!r} is not key=number with a key of {', '.join(defaults)}"
            )
        if key in sizes:
            raise UserError(f"{option} {text!r}: {key} is given twice")
        if not number.isdecimal() or int(number) < 1:
            raise UserError(f"{option} {text!r}: {key}={number!r}, expected a positive whole number")
        sizes[key] = int(number)
    return defaults | sizes
