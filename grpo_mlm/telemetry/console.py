"""What a person sees while a run goes on: a line a step, a bar while generating, a few completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from grpo_mlm.data.batch import RolloutBatch

# metric, heading, format: the columns of a step's line
COLUMNS = (
    ("critic/rewards/mean", "reward", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("actor/pg_clipfrac", "clip", "{:.3f}"),
    ("actor/kl", "kl", "{:.4f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("actor/grad_norm", "grad", "{:.3f}"),
    ("perf/throughput", "tok/s", "{:.0f}"),
    ("timing_s/step", "s", "{:.1f}"),
)
CELL_CHARS = 160


class RunConsole:
    """Prints nothing but errors when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(escape(text), soft_wrap=True)

    def step(self, step: int, total: int, metrics: dict[str, float]) -> None:
        """One line: reward, length, clip fraction, KL, entropy, gradient norm, tokens/s, seconds."""
        cells = [f"{head} {form.format(metrics[name])}" for name, head, form in COLUMNS if name in metrics]
        cells += [f"{name} {value:.3f}" for name, value in metrics.items() if name.startswith("val-core/")]
        self.console.print(
            f"[bold]step {step}/{total}[/]  " + "  ".join(escape(cell) for cell in cells), soft_wrap=True
        )

    @contextmanager
    def generating(self, total: int) -> Iterator[Callable[[], None]]:
        """A progress bar; call what it gives for each finished sample. Draws only on a terminal."""
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(
            *columns, console=self.console, transient=True, disable=not self.console.is_terminal
        ) as bar:
            task = bar.add_task("generating", total=total)
            yield lambda: bar.advance(task)

    def invalid(self, batch: RolloutBatch) -> None:
        """One line when samples are left out of the step: how many, and the first one's reason and prompt."""
        out = np.flatnonzero(~batch.valid)
        if len(out):
            first = int(out[0])
            self.say(
                f"warning: {len(out)} of {len(batch)} samples are invalid and left out; the first: "
                f"{_shorten(batch.reason[first])} (prompt {_shorten(batch.prompt_text[first])!r})"
            )

    def samples(self, batch: RolloutBatch, count: int) -> None:
        """The first completions of the batch, one a prompt where there are enough prompts."""
        if count == 0 or len(batch) == 0:
            return
        table = Table(show_lines=True)
        for head in ("prompt", "response", "answer", "reward"):
            table.add_column(head, justify="right" if head == "reward" else "left")
        for i in np.unique(batch.group_id, return_index=True)[1][:count]:
            reward = f"{batch.reward[i]:.3f}" if batch.valid[i] else f"invalid: {batch.reason[i]}"
            cells = (
                _shorten(batch.prompt_text[i]),
                _shorten(batch.response_text[i]),
                _shorten(batch.answer[i]),
                reward,
            )
            table.add_row(*(escape(cell) for cell in cells))
        self.console.print(table)


def _shorten(text: str) -> str:
    """A long text's end is what matters: the question of a prompt, the answer of a response."""
    return text if len(text) <= CELL_CHARS else "..." + text[-CELL_CHARS:]
