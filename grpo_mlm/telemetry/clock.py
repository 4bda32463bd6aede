"""Where a step's seconds go: phases that tile the step, reported as `timing_s/*`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Starts when it is made; `with clock("gen"):` adds to that phase. Phases must not nest."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - begin)

    def add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Some of `source` was really `target`."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def metrics(self) -> dict[str, float]:
        """`timing_s/PHASE` of each phase, and `timing_s/step` from this clock's start to now."""
        step = time.perf_counter() - self.started
        return {f"timing_s/{phase}": s for phase, s in self.seconds.items()} | {"timing_s/step": step}
