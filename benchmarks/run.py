"""`python -m benchmarks.run NAME [options]`: measures ours against a named alternative, in the same run.

Every benchmark prints a table, or one JSON object with `--json`. Numbers are medians; on a shared machine only the
ratios mean something.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from grpo_mlm.errors import RunFailure, UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
Json = Annotated[bool, typer.Option("--json", help="one JSON object instead of a table")]
Runs = Annotated[int, typer.Option(min=1, help="timed repetitions of each side, taken in turns")]
Model = Annotated[str, typer.Option(help="a model of benchmarks/models.py, or a folder with config.json")]


@app.command("weight_sync")
def weight_sync(
    model: Model = "qwen3-0.6b",
    train: Annotated[str, typer.Option(help="trainer: tp, pp, dp")] = "tp=2,pp=2",
    rollout: Annotated[str, typer.Option(help="engines: tp, replicas")] = "tp=2",
    runs: Runs = 5,
    bucket_mb: Annotated[int, typer.Option(min=1, help="size of the buckets of both sides")] = 64,
    json: Json = False,
) -> None:
    """Weights from trainer ranks to engine ranks over gloo: slices, against gather everything and slice there."""
    from benchmarks.weight_sync import measure

    measure(model, train, rollout, runs, bucket_mb).show(json)


@app.command("weight_sync_plan")
def weight_sync_plan(
    model: Model = "qwen3-32b",
    train: Annotated[str, typer.Option(help="trainer: tp, pp, vpp, ep, etp, dp, first, last")] = "tp=8,dp=8",
    rollout: Annotated[
        str, typer.Option(help="engines: tp, ep (1: whole experts), replicas")
    ] = "tp=4,replicas=8",
    tensors: Annotated[bool, typer.Option("--tensors", help="also a line for every tensor")] = False,
    json: Json = False,
) -> None:
    """The planner alone, on shapes: seconds, memory, and the bytes that each rank sends and receives."""
    from benchmarks.weight_sync_plan import measure

    measure(model, train, rollout, tensors).show(json)


@app.command("convert")
def convert(
    model: Model = "qwen3-0.6b",
    runs: Runs = 3,
    workers: Annotated[int, typer.Option(min=1)] = 2,
    folder: Annotated[str | None, typer.Option(help="where to write, on the disk to be measured")] = None,
    json: Json = False,
) -> None:
    """Import and export of a random model of that shape, against a plain copy of the same bytes."""
    from benchmarks.convert import measure

    measure(model, runs, workers, folder).show(json)


@app.command("fused_loss")
def fused_loss(
    rows: Annotated[int, typer.Option(min=8, help="response tokens, a multiple of 8")] = 1024,
    hidden: Annotated[int, typer.Option(min=1, help="size of a hidden state")] = 512,
    vocab: Annotated[int, typer.Option(min=2, help="rows of the output matrix")] = 151936,
    runs: Runs = 5,
    roofline: Annotated[bool, typer.Option("--roofline", help="the arithmetic for GPUs instead")] = False,
    json: Json = False,
) -> None:
    """Hidden states to loss and gradients on one thread: one pass over the logits, against autograd and others."""
    from benchmarks.fused_loss import measure
    from benchmarks.roofline import roofline as for_gpus

    (for_gpus() if roofline else measure(rows, hidden, vocab, runs)).show(json)


def main() -> None:
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except (UserError, RunFailure) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        sys.exit(error.exit_code)
    except typer.BadParameter.__base__ as error:  # every usage error of typer's
        error.show()
        sys.exit(2)


if __name__ == "__main__":
    main()
