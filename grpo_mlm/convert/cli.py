"""`grpo-mlm convert plan | import | export | verify`, the same as `python -m tools.checkpoint_convert ...`.

Exit codes: see `app`'s help. Results go to standard output, progress and errors to standard error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from grpo_mlm.convert.progress import watched
from grpo_mlm.convert.text import parse_size, printable, show_size
from grpo_mlm.errors import NamesDiffer, UserError

if TYPE_CHECKING:  # torch comes in when a command runs, not for its help
    from grpo_mlm.convert.job import Result
    from grpo_mlm.convert.options import Options, Progress

HELP = """Convert model weights between Hugging Face folders and Megatron checkpoints, bit for bit.

`python -m tools.checkpoint_convert` is the same as `grpo-mlm convert`.

No model is built and no tensor is held whole: memory stays bounded whatever the size of the model.

\b
Weights are one of
  a Hugging Face folder     config.json, *.safetensors, tokenizer (or a hub id)
  a torch_dist folder       what import writes, and what Megatron saves (iter_0001000)
  a Megatron save root      the folder with latest_checkpointed_iteration.txt

\b
From a Hugging Face model to Megatron and back:
  grpo-mlm convert plan   Qwen3-8B dist
  grpo-mlm convert import Qwen3-8B qwen3-8b-megatron
  grpo-mlm convert export qwen3-8b-megatron Qwen3-8B-again
  grpo-mlm convert verify Qwen3-8B Qwen3-8B-again

A conversion writes to DST.partial and renames it to DST when all is on the disk. After an interruption the same
command goes on where it was.

\b
Exit codes
  0    done; verify: equal
  1    failed for another reason
  2    usage: a wrong option, a path that is not there, a damaged file, DST not empty
  3    tensor names missing or unexpected
  4    values differ
  5    not enough disk, or --memory-limit too small
  130  interrupted (Ctrl-C; for import and export SIGTERM too); the same command goes on
"""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in examples are no markup
    help=HELP,
)

SRC = typer.Argument(metavar="SRC", help="weights: a folder, or a hub id", show_default=False)
DST = typer.Argument(metavar="DST", help="folder to write; must not exist, or be empty", show_default=False)
MEMORY = typer.Option(metavar="SIZE", help="bytes of all buffers together; Python takes 300 MB more")
WORKERS = typer.Option(min=1, metavar="N", help="files that are read and written at a time")
ALLOW = typer.Option(
    metavar="PATTERN",
    help="let tensors whose names match (* and ? are wildcards) be missing or unexpected; repeatable; recorded",
    show_default=False,
)
REFERENCE = typer.Option(
    metavar="FOLDER",
    help="Hugging Face folder with config and tokenizer, for a Megatron checkpoint that does not carry them",
    show_default=False,
)
REMOTE_CODE = typer.Option(
    "--allow-remote-code",
    "--trust-remote-code",
    help="accept a model folder that brings Python code, and copy it along; it is never run",
)
SHARD = typer.Option(metavar="SIZE", help="largest output file, unless one tensor alone is larger")
DTYPE = typer.Option(
    metavar="DTYPE", help="dtype to write: keep (as stored), bfloat16, float16 or float32; rounds to nearest"
)
QUIET = typer.Option("--quiet", "-q", help="print nothing but errors (and JSON, with --json)")
JSON = typer.Option("--json", help="print the result as JSON on standard output")
RESTART = typer.Option(
    "--restart", help="delete what an interrupted conversion left in DST.partial, begin anew"
)
CHECK = typer.Option(
    metavar="HOW",
    help="after writing: none, hash (read the output back against the manifest's hashes), or full (compare every "
    "tensor with SRC)",
)


@app.command()
def plan(
    src: Annotated[Path, SRC],
    targets: Annotated[
        list[str],
        typer.Argument(metavar="TARGET...", help="hf, dist, megatron:... or vllm:...", show_default=False),
    ],
    dtype: Annotated[str, DTYPE] = "keep",
    max_shard_size: Annotated[str, SHARD] = "5GB",
    workers: Annotated[int, WORKERS] = 2,
    memory_limit: Annotated[str, MEMORY] = "512MiB",
    disk_speed: Annotated[
        str,
        typer.Option(metavar="SIZE", help="bytes a second, for the estimate of time; nothing is measured"),
    ] = "1GB",
    each_tensor: Annotated[
        bool, typer.Option("--tensors", help="a line for each tensor instead of each kind")
    ] = False,
    summary: Annotated[bool, typer.Option("--summary", help="totals only")] = False,
    allow_missing: Annotated[list[str] | None, ALLOW] = None,
    reference: Annotated[Path | None, REFERENCE] = None,
    allow_remote_code: Annotated[bool, REMOTE_CODE] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Show what a conversion would do; reads headers only, writes nothing.

    \b
    A target is one of
      hf                     the Hugging Face folder that export would write
      dist                   the Megatron checkpoint that import would write
      megatron:KEY=N,...     what each rank of a trainer would hold
          tp, pp, ep, etp    sizes of tensor, pipeline, expert, expert tensor parallelism (1; etp: as tp)
          vpp                model chunks a pipeline stage (1)
          dp                 data parallel size (the least that fits the experts)
          first, last        layers of the first and last pipeline stage (even)
          te                 true: names of Transformer Engine (false)
      vllm:KEY=N,...         what each rank of the engines would hold
          tp, replicas       tensor parallel size, engines (1)
          ep                 true: whole experts on each rank (false)

    \b
    Examples
      grpo-mlm convert plan Qwen3-8B dist
      grpo-mlm convert plan Qwen3-30B-A3B megatron:tp=2,pp=2,ep=4 vllm:tp=4 --summary
      grpo-mlm convert plan megatron-run hf --max-shard-size 2GB --json

    Exit code 3 where names are missing or unexpected.
    """
    from grpo_mlm.convert.open import open_weights
    from grpo_mlm.convert.plan_report import describe_source, plan_target
    from grpo_mlm.convert.plan_table import Detail, show
    from grpo_mlm.convert.plan_table import as_json as plan_json
    from grpo_mlm.convert.plan_targets import parse_target

    if each_tensor and summary:
        raise UserError("--tensors and --summary exclude each other")
    detail: Detail = "tensors" if each_tensor else "summary" if summary else "kinds"
    parsed = [parse_target(text) for text in targets]
    options = _options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, False, reference, allow_remote_code
    )
    speed = parse_size(disk_speed, "--disk-speed")
    # Every difference of names is shown, not the first of them.
    weights = open_weights(src, reference, ("*",), allow_remote_code)
    source = describe_source(weights, options.allow_missing)
    plans = [plan_target(weights, target, options, speed) for target in parsed]
    if as_json:
        _print_json(plan_json(source, plans, detail, speed))
    else:
        _print(show(source, plans, detail, speed))
    if source.missing or source.unexpected:
        raise NamesDiffer(
            f"{src}: {len(source.missing)} tensors missing, {len(source.unexpected)} unexpected"
        )


@app.command("import")
def import_(
    src: Annotated[Path, SRC],
    dst: Annotated[Path, DST],
    dtype: Annotated[str, DTYPE] = "keep",
    workers: Annotated[int, WORKERS] = 2,
    memory_limit: Annotated[str, MEMORY] = "512MiB",
    max_shard_size: Annotated[str, SHARD] = "1GiB",
    allow_missing: Annotated[list[str] | None, ALLOW] = None,
    reference: Annotated[Path | None, REFERENCE] = None,
    allow_remote_code: Annotated[bool, REMOTE_CODE] = False,
    restart: Annotated[bool, RESTART] = False,
    verify: Annotated[str, CHECK] = "none",
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write a Megatron distributed checkpoint (torch_dist), which Megatron loads at any TP x PP x EP.

    The config and the tokenizer of SRC go to the subfolder DST/hf, hashes and options to DST/manifest.json.

    \b
    Examples
      grpo-mlm convert import Qwen3-8B qwen3-8b-megatron
      grpo-mlm convert import Qwen3-8B qwen3-8b-megatron --dtype bfloat16 --workers 8 --memory-limit 2GB --verify full
    """
    from grpo_mlm.convert.job import import_checkpoint

    options = _options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, restart, reference, allow_remote_code
    )
    _convert(import_checkpoint, src, dst, options, verify, quiet, as_json)


@app.command()
def export(
    src: Annotated[Path, SRC],
    dst: Annotated[Path, DST],
    dtype: Annotated[str, DTYPE] = "keep",
    workers: Annotated[int, WORKERS] = 2,
    memory_limit: Annotated[str, MEMORY] = "512MiB",
    max_shard_size: Annotated[str, SHARD] = "5GB",
    allow_missing: Annotated[list[str] | None, ALLOW] = None,
    reference: Annotated[Path | None, REFERENCE] = None,
    allow_remote_code: Annotated[bool, REMOTE_CODE] = False,
    restart: Annotated[bool, RESTART] = False,
    verify: Annotated[str, CHECK] = "none",
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write a Hugging Face folder: safetensors files with their index; config, tokenizer and templates as they were.

    Hashes and options go to DST/conversion_manifest.json.

    \b
    Examples
      grpo-mlm convert export qwen3-8b-megatron Qwen3-8B-tuned
      grpo-mlm convert export megatron-run Qwen3-8B-tuned --reference Qwen3-8B --max-shard-size 2GB --dtype bfloat16
    """
    from grpo_mlm.convert.job import export_checkpoint

    options = _options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, restart, reference, allow_remote_code
    )
    _convert(export_checkpoint, src, dst, options, verify, quiet, as_json)


@app.command()
def verify(
    a: Annotated[Path, typer.Argument(metavar="A", help="weights of any format", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B", help="weights of any format", show_default=False)],
    allow_rounding: Annotated[
        bool,
        typer.Option(
            "--allow-rounding",
            help="accept tensors that differ in nothing but rounding to the narrower of two dtypes",
        ),
    ] = False,
    logits: Annotated[
        bool,
        typer.Option(
            "--logits",
            help="also compare logits of a fixed prompt in float32; holds one whole model in memory",
        ),
    ] = False,
    logits_tolerance: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="largest absolute difference of logits that passes")
    ] = 1e-4,
    reference: Annotated[Path | None, REFERENCE] = None,
    allow_remote_code: Annotated[bool, REMOTE_CODE] = False,
    workers: Annotated[int, WORKERS] = 2,
    memory_limit: Annotated[str, MEMORY] = "512MiB",
    quiet: Annotated[bool, QUIET] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Compare two sets of weights bit for bit, tensor by tensor, whatever their formats.

    Tensors of different dtypes are compared by value, after a widening that loses nothing. NaNs are compared by their
    bits. A tied head that one side stores is compared with the embedding.

    \b
    Examples
      grpo-mlm convert verify Qwen3-8B qwen3-8b-megatron
      grpo-mlm convert verify Qwen3-8B Qwen3-8B-bf16 --allow-rounding --logits --logits-tolerance 0.05

    Exit code 3 where one side has tensors that the other has not, 4 where values differ.
    """
    from grpo_mlm.convert import verify_report as report
    from grpo_mlm.convert.logits import compare_logits, raise_unless_close
    from grpo_mlm.convert.open import open_weights
    from grpo_mlm.convert.verify import verify as compare

    limit = parse_size(memory_limit, "--memory-limit")
    both = [open_weights(path, reference, ("*",), allow_remote_code) for path in (a, b)]
    with watched("comparing", quiet) as progress:
        verdict = compare(*both, workers, limit, progress)
    gap = (
        compare_logits(*both, logits_tolerance)
        if logits and not (verdict.only_in_a or verdict.only_in_b)
        else None
    )
    if as_json:
        _print_json(report.as_json(verdict, allow_rounding) | {"logits": gap.as_json() if gap else None})
    elif not quiet:
        _print([*report.lines(verdict, allow_rounding), *([gap.line()] if gap else [])])
    report.raise_unless_equal(verdict, allow_rounding)
    if gap:
        raise_unless_close(gap)


def _convert(
    convert: Callable[[Path, Path, Options, Progress], Result],
    src: Path,
    dst: Path,
    options: Options,
    how: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a conversion, check its output as `how` says, and tell what came of it."""
    from grpo_mlm.convert.check import CHECKS, check_output

    if how not in CHECKS:
        raise UserError(f"--verify {how!r}: expected {', '.join(CHECKS)}")
    try:
        with watched("writing", quiet) as progress:
            result = convert(src, dst, options, progress)
        with watched("checking", quiet or how == "none") as progress:
            check_output(how, src, dst, options, progress)
    except KeyboardInterrupt:
        Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(
            f"stopped; the same command goes on from {dst}.partial"
        )
        raise
    if as_json:
        _print_json(asdict(result) | {"verified": how})
    elif not quiet:
        checked = {"none": "", "hash": "; hashes checked", "full": "; every tensor compared with the source"}[
            how
        ]
        files = "1 file" if result.files == 1 else f"{result.files} files"
        _print([f"wrote {result.out}: {show_size(result.bytes)} in {files}{checked}"])


def _options(
    workers: int,
    memory_limit: str,
    max_shard_size: str,
    dtype: str,
    allow_missing: list[str] | None,
    restart: bool,
    reference: Path | None,
    allow_remote_code: bool,
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


def _print(parts: Iterable[str | Table]) -> None:
    """To standard output; a table is as wide as the terminal, or as wide as it needs where there is none."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = 200
    for part in parts:
        console.print(printable(part) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


def _print_json(content: dict[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2, allow_nan=False, default=str))
