"""What the console says of a step."""

from __future__ import annotations

from io import StringIO

import numpy as np
from rich.console import Console

from grpo_mlm.telemetry.console import RunConsole
from tests.telemetry.test_batch_metrics import make_batch


def said_of(rewards: list[float]) -> str:
    batch = make_batch(rewards, [1] * len(rewards), ["stop"] * len(rewards))
    batch.prompt_text = [f"prompt [{i}]" for i in range(len(rewards))]
    console, out = RunConsole(), StringIO()
    console.console = Console(file=out, width=80)
    console.invalid(batch)
    return out.getvalue()


def test_samples_that_are_left_out_are_warned_of_with_their_prompt() -> None:
    """ADV-06."""
    said = said_of([1.0, np.nan, 0.0, np.nan])
    assert said == (
        "warning: 2 of 4 samples are invalid and left out; the first: timeout: 3 s (prompt 'prompt [1]')\n"
    )
    assert said_of([1.0, 0.0]) == ""
