"""What the conversion commands do once their arguments are read: run, print, and raise what ends them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from grpo_mlm.convert.progress import watched
from grpo_mlm.convert.system_errors import system_errors
from grpo_mlm.convert.text import parse_size, printable, show_size
from grpo_mlm.errors import NamesDiffer, UserError

if TYPE_CHECKING:
    from grpo_mlm.convert.options import Options

PIPE_COLUMNS = 200
"""Width of tables where there is no terminal."""


def read_options(
    workers: int,
    memory_limit: str,
    max_shard_size: str,
    dtype: str,
    allow_missing: list[str] | None,
    reference: Path | None,
    allow_remote_code: bool,
    restart: bool = False,
) -> Options:
    """UserError: a size or a dtype that is none."""
    from grpo_mlm.convert.options import TORCH_DTYPES, Options

    if dtype != "keep" and dtype not in TORCH_DTYPES:
        raise UserError(f"--dtype {dtype!r}: expected keep, {', '.join(TORCH_DTYPES)}")
    return Options(
        workers=workers,
        memory_limit=parse_size(memory_limit, "--memory-limit"),
        max_shard_size=parse_size(max_shard_size, "--max-shard-size"),
        dtype=dtype,  # type: ignore[arg-type]
        allow_missing=tuple(allow_missing or ()),
        restart=restart,
        reference=reference,
        allow_remote_code=allow_remote_code,
    )


@system_errors()
def run_plan(
    src: Path,
    targets: list[str],
    options: Options,
    disk_speed: str,
    each_tensor: bool,
    summary: bool,
    as_json: bool,
) -> None:
    """Print the plan. NamesDiffer, after it is printed, where tensors are missing or unexpected."""
    from grpo_mlm.convert.open import open_weights
    from grpo_mlm.convert.plan_report import describe_source, plan_target
    from grpo_mlm.convert.plan_table import Detail, show
    from grpo_mlm.convert.plan_table import as_json as in_json
    from grpo_mlm.convert.plan_targets import parse_target

    if each_tensor and summary:
        raise UserError("--tensors and --summary exclude each other")
    detail: Detail = "tensors" if each_tensor else "summary" if summary else "kinds"
    parsed = [parse_target(text) for text in targets]
    speed = parse_size(disk_speed, "--disk-speed")
    # Opened with all names allowed to differ, so that every difference is shown and not the first of them.
    weights = open_weights(src, options.reference, ("*",), options.allow_remote_code)
    source = describe_source(weights, options.allow_missing)
    plans = [plan_target(weights, source, target, options, speed) for target in parsed]
    if as_json:
        _print_json(in_json(source, plans, detail, speed))
    else:
        _print(show(source, plans, detail, speed))
    if source.missing or source.unexpected:
        raise NamesDiffer(
            f"{src}: {len(source.missing)} tensors missing, {len(source.unexpected)} unexpected"
        )


@system_errors()
def run_conversion(
    command: Literal["import", "export"],
    src: Path,
    dst: Path,
    options: Options,
    how: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Convert, check the output as `how` says, and tell what came of it."""
    from grpo_mlm.convert.check import CHECKS, check_output
    from grpo_mlm.convert.job import export_checkpoint, import_checkpoint

    if how not in CHECKS:
        raise UserError(f"--verify {how!r}: expected {', '.join(CHECKS)}")
    convert = import_checkpoint if command == "import" else export_checkpoint

    def check(folder: Path) -> None:
        if how != "none":
            with watched("checking", quiet) as progress:
                check_output(how, src, folder, options, progress)

    with watched("writing", quiet) as progress:
        result = convert(src, dst, options, progress, check)
    if as_json:
        _print_json(asdict(result) | {"verified": how})
    elif not quiet:
        checked = {"none": "", "hash": "; hashes checked", "full": "; every tensor compared with the source"}
        files = "1 file" if result.files == 1 else f"{result.files} files"
        _print([f"wrote {result.out}: {show_size(result.bytes)} in {files}{checked[how]}"])


@system_errors()
def run_verify(
    a: Path,
    b: Path,
    options: Options,
    allow_rounding: bool,
    logits_tolerance: float | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the verdict on two sets of weights. NamesDiffer or ValuesDiffer, after that, where they are not equal."""
    from grpo_mlm.convert import verify_report as report
    from grpo_mlm.convert.logits import compare_logits, raise_unless_close
    from grpo_mlm.convert.open import open_weights
    from grpo_mlm.convert.verify import verify

    first, second = (
        open_weights(path, options.reference, ("*",), options.allow_remote_code) for path in (a, b)
    )
    with watched("comparing", quiet) as progress:
        verdict = verify(first, second, options, progress)
    gap = None
    if logits_tolerance is not None and verdict.same_tensors:
        if verdict.allowed:
            raise UserError("--logits needs whole models, and --allow-missing lets tensors be missing")
        gap = compare_logits(first, second, logits_tolerance)
    if as_json:
        _print_json(report.as_json(verdict, allow_rounding) | {"logits": gap.as_json() if gap else None})
    elif not quiet:
        _print([*report.lines(verdict, allow_rounding), *([gap.line()] if gap else [])])
    report.raise_unless_equal(verdict, allow_rounding)
    if gap:
        raise_unless_close(gap)


def _print(parts: Iterable[str | Table]) -> None:
    """To standard output."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, allow_nan=False, default=str))
