"""Conversions of weights between the formats: one job, whatever they are.

The layouts of source and target are joined by the planner; files of the target are then put together from slices of
the source, so that memory does not depend on the model's size. All is written to `DST.partial` and renamed at the end.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from grpo_mlm.bridge.durable import publish
from grpo_mlm.bridge.hf_store import some, without
from grpo_mlm.convert.gather import Gather, target_dtypes
from grpo_mlm.convert.journal import JOURNAL, Journal
from grpo_mlm.convert.manifest import describe_job, fingerprint, write_manifest
from grpo_mlm.convert.open import DIST_MANIFEST, SIDECAR, Weights, open_weights
from grpo_mlm.convert.options import TORCH_DTYPES, Options, Progress
from grpo_mlm.convert.resources import check_disk, memory_budget
from grpo_mlm.convert.sidecar import HF_MANIFEST, copy_sidecar
from grpo_mlm.convert.target import DistTarget, HFTarget, Target
from grpo_mlm.convert.workers import FileWriter
from grpo_mlm.errors import NamesDiffer, RunFailure, UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron_dist import DistLayout, dist_layout
from grpo_mlm.layouts.planner import make_plan

Format = Literal["hf", "torch_dist"]


@dataclass(frozen=True)
class Result:
    """What a conversion wrote. `bytes` are those of tensors; the others are what the manifest has too."""

    out: Path
    files: int
    bytes: int
    skipped: tuple[str, ...]
    changes: tuple[str, ...]
    not_finite: dict[str, int]


def import_checkpoint(src: Path, dst: Path, options: Options, progress: Progress) -> Result:
    """Any weights -> a Megatron distributed checkpoint that stock megatron-core loads at any parallel sizes.

    The config and the tokenizer go to its subfolder `hf`. Errors and interruption: as `convert`.
    """
    return convert(src, dst, "torch_dist", options, progress)


def export_checkpoint(src: Path, dst: Path, options: Options, progress: Progress) -> Result:
    """Any weights -> a Hugging Face folder, with the config and the tokenizer byte for byte.

    Errors and interruption: as `convert`.
    """
    return convert(src, dst, "hf", options, progress)


def convert(src: Path, dst: Path, output: Format, options: Options, progress: Progress) -> Result:
    """Write the weights at `src` to the new folder `dst`. What a killed run has finished is kept by the next.

    Values are copied as they are: NaN and infinite ones are counted and reported, not refused.
    UserError: `dst` is not empty, `src` is damaged, another job's files are in `dst.partial`. NamesDiffer: as
    `open_weights`. OutOfResources: disk or memory limit too small. KeyboardInterrupt: Ctrl-C or the SystemExit of
    a signal handler; everything has stopped and the same call goes on later.
    """
    _check_options(options)
    _refuse_existing(dst)
    source = open_weights(src, options.reference, options.allow_missing, options.allow_remote_code)
    for name in source.skipped:
        progress.say(f"left out: {name} (--allow-missing)")
    wanted = _wanted_layout(source, output)
    plan = make_plan([source.store.layout], [wanted])
    budget = memory_budget(options.memory_limit, options.workers, wanted)
    dtypes = target_dtypes(source.store, wanted, plan.copies, TORCH_DTYPES.get(options.dtype))
    target = _target(wanted, dtypes, budget.block_bytes, options.max_shard_size)
    job = describe_job(source, output, options, budget.block_bytes, plan.digest)
    partial = dst.with_name(dst.name + ".partial")
    if options.restart and partial.exists():
        shutil.rmtree(partial)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with Journal(partial, fingerprint(job)) as journal:
        files = target.files()
        done = sum(files[file] for file in journal.done)
        check_disk(dst, sum(files.values()) - done)
        progress.start(sum(files.values()), done)
        gather = Gather(source.store, wanted, plan.copies, dtypes)
        _write(FileWriter(partial, target, gather, journal, progress, budget.workers), dst, progress)
        records = [journal.done[file] for file in files]
        target.finish(partial, records)
        changes = copy_sidecar(source.sidecar, partial / SIDECAR if output == "torch_dist" else partial, options.dtype)
        if describe_job(source, output, options, budget.block_bytes, plan.digest) != job:
            raise RunFailure(f"{src} was changed while it was converted; convert it again with --restart")
        manifest = partial / (DIST_MANIFEST if output == "torch_dist" else HF_MANIFEST)
        not_finite = write_manifest(manifest, job, records, changes)
        (partial / JOURNAL).unlink()
        publish(partial, dst)
    for line in changes:
        progress.say(line)
    for name, count in not_finite.items():
        progress.say(f"warning: {name} has {count} values that are NaN or infinite, copied as they are")
    return Result(dst, len(files), sum(files.values()), source.skipped, tuple(changes), not_finite)
