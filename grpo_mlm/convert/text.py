"""Sizes and names as people write and read them."""

from __future__ import annotations

import re

from grpo_mlm.errors import UserError

_UNITS = {"B": 1}
for _power, _letter in enumerate("KMGT", 1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Z]+)", re.ASCII | re.IGNORECASE)


def parse_size(text: str, what: str) -> int:
    """Bytes of a size such as `5GB` (10^9 bytes each) or `512MiB` (2^20); `what` is the option, for the error."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    size = round(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise UserError(
            f"{what} {text!r}: expected a positive number and a unit, such as 5GB or 512MiB "
            "(units: B, KB, MB, GB, TB in steps of 1000; KiB, MiB, GiB, TiB in steps of 1024)"
        )
    return size


def show_size(n: int) -> str:
    """Three digits and a unit in steps of 1000."""
    size, unit = float(n), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    return f"{n} B" if unit == "B" else f"{size:.3g} {unit}"


def show_seconds(seconds: float) -> str:
    """In seconds, minutes or hours."""
    if seconds < 1:
        return "under 1 s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printable(text: str) -> str:
    """The text without what steers a terminal: a file may name its tensors in any way."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
