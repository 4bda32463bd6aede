"""The command line: `grpo-mlm train CONFIG [key=value ...]` and `grpo-mlm convert ...`.

Exit codes: 0 done, 1 the run failed, 2 the user's mistake, 130 Ctrl-C, 143 SIGTERM. Conversions have more: see
`convert/cli.py`.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from grpo_mlm.config import load_config
from grpo_mlm.convert.cli import app as convert_app
from grpo_mlm.convert.text import printable
from grpo_mlm.errors import RunFailure, UserError

USAGE_ERROR: Any = typer.BadParameter.__base__  # typer shows only this subclass of its usage errors

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


app.add_typer(
    convert_app, name="convert", short_help="Convert weights: Hugging Face folders, Megatron checkpoints."
)


@app.callback()
def root() -> None:
    """GRPO training of language models on Megatron and vLLM."""


@app.command()
def train(
    config_file: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="dotted.key=value, any key of the config")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="check config, model and data, print the layout, stop")
    ] = False,
) -> None:
    """Train a policy with GRPO.

    Every key is documented in grpo_mlm/config/schema.py; examples are in yaml_configs/.
    """
    config = load_config(config_file, overrides or [])
    # Heavy imports wait until the config is known to be right.
    from grpo_mlm.trainer.prepare import prepare

    prepared = prepare(config)
    out = Console(highlight=False, soft_wrap=True, markup=False)
    if dry_run:
        dropped = ", ".join(f"{rows} {reason}" for reason, rows in prepared.dropped.items())
        out.print(f"model    {prepared.model_folder}")
        out.print(f"layout   {prepared.world.describe()} on {prepared.device}")
        out.print(f"prompts  {len(prepared.train_prompts)} train, {len(prepared.val_prompts)} validation")
        out.print(f"dropped  {dropped or 'none'}")
        out.print(f"rewards  {', '.join(f'{f.weight:g} x {f.name}' for f in config.reward.functions)}")
        out.print(
            f"steps    {prepared.total_steps}, each of {config.data.train_batch_size} prompts x "
            f"{config.rollout.n} samples, {config.mini_batch_size} prompts an optimizer step"
        )
        return
    from grpo_mlm.trainer.loop import train as train_loop
    from grpo_mlm.trainer.run import open_run

    with open_run(config, prepared) as run:
        train_loop(run)
        run.summarize()


def _terminate(signum: int, _frame: FrameType | None) -> None:
    """SIGTERM unwinds the run like any other end, so that no process stays behind."""
    sys.exit(128 + signum)


def main(command: typer.Typer = app, name: str = "grpo-mlm") -> None:
    """Run a command line; the one place where errors become messages and exit codes."""
    signal.signal(signal.SIGTERM, _terminate)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A sample's text must not end the run where the terminal lacks a character of it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    code = 0
    try:
        code = command(standalone_mode=False, prog_name=name) or 0  # 130 after Ctrl-C
    except (UserError, RunFailure) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"error: {printable(str(error))}", markup=False
        )
        code = error.exit_code
    except USAGE_ERROR as error:
        error.show()
        code = 2
    if code == 130:
        Console(stderr=True).print("interrupted")
    sys.exit(code)
