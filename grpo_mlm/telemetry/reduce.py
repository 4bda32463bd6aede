"""Metrics of parts (micro-batches, ranks) into metrics of the whole, each with its own denominator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Part:
    """A metric over some of the tokens. For a mean, `value` is the sum and `count` what to divide it by."""

    kind: Literal["sum", "mean", "max", "min"]
    value: float
    count: float = 0.0


def merge(parts: Iterable[Mapping[str, Part]]) -> dict[str, Part]:
    """The same metrics over the union of the parts."""
    whole: dict[str, Part] = {}
    for part in parts:
        for name, new in part.items():
            whole[name] = _join(whole[name], new) if name in whole else new
    return whole


def reduce_metrics(parts: Iterable[Mapping[str, Part]]) -> dict[str, float]:
    """Numbers to log; a mean over nothing is left out."""
    whole = merge(parts)
    return {
        name: part.value / part.count if part.kind == "mean" else part.value
        for name, part in whole.items()
        if part.kind != "mean" or part.count
    }


def over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """One record for several optimizer steps: means, but extremes of extremes and the total of skipped steps."""
    columns = {
        name: [step[name] for step in steps if name in step] for name in {n for step in steps for n in step}
    }
    return {name: _over_steps(name, values) for name, values in sorted(columns.items())}


def _over_steps(name: str, values: list[float]) -> float:
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    total = math.fsum(values)
    return total if name.endswith("/skipped_steps") else total / len(values)


def _join(a: Part, b: Part) -> Part:
    assert a.kind == b.kind, (a, b)
    if a.kind == "max":
        return max(a, b, key=lambda part: part.value)
    if a.kind == "min":
        return min(a, b, key=lambda part: part.value)
    return Part(a.kind, a.value + b.value, a.count + b.count)
