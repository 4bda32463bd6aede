"""`grpo-mlm convert plan | import | export | verify`, the same as `python -m tools.checkpoint_convert ...`.

Results go to standard output, progress and errors to standard error. `cli.py` above turns errors into exit codes.
"""

from __future__ import annotations

import typer

from grpo_mlm.convert import cli_options as cli
from grpo_mlm.convert import cli_run as run  # torch comes in when a command runs, not for its help

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


@app.command()
def plan(
    src: cli.Source,
    targets: cli.Targets,
    dtype: cli.Dtype = "keep",
    max_shard_size: cli.ShardSize = "5GB",
    workers: cli.Workers = 2,
    memory_limit: cli.MemoryLimit = "512MiB",
    disk_speed: cli.DiskSpeed = "1GB",
    each_tensor: cli.EachTensor = False,
    summary: cli.Summary = False,
    allow_missing: cli.AllowMissing = None,
    reference: cli.Reference = None,
    allow_remote_code: cli.RemoteCode = False,
    as_json: cli.AsJson = False,
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
    options = run.read_options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, reference, allow_remote_code
    )
    run.run_plan(src, targets, options, disk_speed, each_tensor, summary, as_json)


@app.command("import")
def import_(
    src: cli.Source,
    dst: cli.Output,
    dtype: cli.Dtype = "keep",
    workers: cli.Workers = 2,
    memory_limit: cli.MemoryLimit = "512MiB",
    max_shard_size: cli.DistShardSize = "1GiB",
    allow_missing: cli.AllowMissing = None,
    reference: cli.Reference = None,
    allow_remote_code: cli.RemoteCode = False,
    restart: cli.Restart = False,
    verify: cli.Check = "none",
    quiet: cli.Quiet = False,
    as_json: cli.AsJson = False,
) -> None:
    """Write a Megatron distributed checkpoint (torch_dist), which Megatron loads at any TP x PP x EP.

    The config and the tokenizer of SRC go to the subfolder DST/hf, hashes and options to DST/manifest.json.

    \b
    Examples
      grpo-mlm convert import Qwen3-8B qwen3-8b-megatron
      grpo-mlm convert import Qwen3-8B qwen3-8b-megatron --dtype bfloat16 --workers 8 --memory-limit 2GB --verify full
    """
    options = run.read_options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, reference, allow_remote_code, restart
    )
    run.run_conversion("import", src, dst, options, verify, quiet, as_json)


@app.command()
def export(
    src: cli.Source,
    dst: cli.Output,
    dtype: cli.Dtype = "keep",
    workers: cli.Workers = 2,
    memory_limit: cli.MemoryLimit = "512MiB",
    max_shard_size: cli.ShardSize = "5GB",
    allow_missing: cli.AllowMissing = None,
    reference: cli.Reference = None,
    allow_remote_code: cli.RemoteCode = False,
    restart: cli.Restart = False,
    verify: cli.Check = "none",
    quiet: cli.Quiet = False,
    as_json: cli.AsJson = False,
) -> None:
    """Write a Hugging Face folder: safetensors files with their index; config, tokenizer and templates as they were.

    Hashes and options go to DST/conversion_manifest.json.

    \b
    Examples
      grpo-mlm convert export qwen3-8b-megatron Qwen3-8B-tuned
      grpo-mlm convert export megatron-run Qwen3-8B-tuned --reference Qwen3-8B --max-shard-size 2GB --dtype bfloat16
    """
    options = run.read_options(
        workers, memory_limit, max_shard_size, dtype, allow_missing, reference, allow_remote_code, restart
    )
    run.run_conversion("export", src, dst, options, verify, quiet, as_json)


@app.command()
def verify(
    a: cli.Side,
    b: cli.Side,
    allow_rounding: cli.AllowRounding = False,
    logits: cli.Logits = False,
    logits_tolerance: cli.LogitsTolerance = 1e-4,
    allow_missing: cli.AllowMissing = None,
    reference: cli.Reference = None,
    allow_remote_code: cli.RemoteCode = False,
    workers: cli.Workers = 2,
    memory_limit: cli.MemoryLimit = "512MiB",
    quiet: cli.Quiet = False,
    as_json: cli.AsJson = False,
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
    options = run.read_options(
        workers, memory_limit, "5GB", "keep", allow_missing, reference, allow_remote_code
    )
    tolerance = logits_tolerance if logits else None
    run.run_verify(a, b, options, allow_rounding, tolerance, quiet, as_json)
