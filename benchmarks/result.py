"""What a benchmark found: rows of numbers, and the machine and commit they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass
class Result:
    """Rows share their keys. `notes` say what was compared with what."""

    benchmark: str
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def show(self, as_json: bool) -> None:
        """To standard output: one JSON object, or a table for people."""
        if as_json:
            print(json.dumps(asdict(self) | {"machine": machine()}, indent=2))
            return
        table = Table(title=self.benchmark, title_justify="left")
        for key in self.rows[0]:
            justify: Any = "left" if isinstance(self.rows[0][key], str) else "right"
            table.add_column(key, justify=justify, no_wrap=True)
        for row in self.rows:
            table.add_row(*(_text(value) for value in row.values()))
        console = Console(highlight=False, width=200)  # as wide as it needs, whatever the terminal
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Median of several runs, with the fastest and the slowest."""
    return {"median s": median(seconds), "min s": min(seconds), "max s": max(seconds)}


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
