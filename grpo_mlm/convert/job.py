"""Conversions of weights between the formats: one job, whatever they are.

The layouts of source and target are joined by the planner; the target's files are then put together from slices of
the source, so that memory does not depend on the model's size. All is written to `DST.partial` and renamed at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_mlm.bridge.durable import publish
from grpo_mlm.convert.dtypes import target_dtypes
from grpo_mlm.convert.gather import Gather
from grpo_mlm.convert.homes import check_homes
from grpo_mlm.convert.journal import Journal
from grpo_mlm.convert.manifest import Job, not_finite_values, write_manifest
from grpo_mlm.convert.open import DIST_MANIFEST, SIDECAR, open_weights
from grpo_mlm.convert.options import Options, Progress
from grpo_mlm.convert.output import check_output_folder, partial_of
from grpo_mlm.convert.resources import check_disk, memory_budget
from grpo_mlm.convert.sidecar import HF_MANIFEST, copy_sidecar
from grpo_mlm.convert.target import DistTarget, Format, HFTarget, Target
from grpo_mlm.convert.wanted import wanted_layout
from grpo_mlm.convert.workers import FileWriter
from grpo_mlm.errors import RunFailure, UserError
from grpo_mlm.layouts.megatron_dist import DistLayout
from grpo_mlm.layouts.planner import make_plan


@dataclass(frozen=True)
class Result:
    """What a conversion wrote; `bytes` are those of its tensors.

    `skipped`: names left out by --allow-missing. `changes`: lines on what was changed beside the weights.
    `not_finite`: NaN and infinite values by tensor of the output.
    """

    out: Path
    files: int
    bytes: int
    skipped: tuple[str, ...]
    changes: tuple[str, ...]
    not_finite: dict[str, int]


@dataclass(frozen=True)
class _Work:
    """A conversion that is ready to be done."""

    job: Job
    target: Target
    gather: Gather
    workers: int


def import_checkpoint(
    src: Path,
    dst: Path,
    options: Options,
    progress: Progress,
    check: Callable[[Path], None] = lambda folder: None,
) -> Result:
    """Any weights -> a Megatron distributed checkpoint that stock megatron-core loads at any parallel sizes.

    The config and the tokenizer go to its subfolder `hf`. Errors and interruption: as `convert`.
    """
    return convert(src, dst, "torch_dist", options, progress, check)


def export_checkpoint(
    src: Path,
    dst: Path,
    options: Options,
    progress: Progress,
    check: Callable[[Path], None] = lambda folder: None,
) -> Result:
    """Any weights -> a Hugging Face folder, with the config and the tokenizer byte for byte.

    Errors and interruption: as `convert`.
    """
    return convert(src, dst, "hf", options, progress, check)


def convert(
    src: Path,
    dst: Path,
    output: Format,
    options: Options,
    progress: Progress,
    check: Callable[[Path], None] = lambda folder: None,
) -> Result:
    """Write the weights at `src` to the new folder `dst`. What a run that was killed has finished, the next one keeps.

    `check` gets the folder when it is whole and not yet at `dst`; what it raises leaves it where it is.
    Values are copied as they are: NaN and infinite ones are counted and reported, not refused.
    UserError: `dst` is not empty, `src` is damaged, another job's files are in `dst.partial`. NamesDiffer: as
    `open_weights`. OutOfResources: disk or memory limit too small. KeyboardInterrupt: Ctrl-C, or the SystemExit of
    a signal handler; all has stopped, and the same call goes on from there.
    """
    dst = check_output_folder(dst, [src] if options.reference is None else [src, options.reference])
    work = _prepare(src, output, options, progress)
    partial = partial_of(dst)
    dst.parent.mkdir(parents=True, exist_ok=True)
    with Journal(partial, work.job.fingerprint, options.restart) as journal:
        try:
            _write_weights(work, dst, journal, progress)
            changes = _write_the_rest(work, partial, journal)
            check(partial)
            publish(partial, dst)
        except (KeyboardInterrupt, SystemExit) as end:
            progress.say(f"interrupted; the same command goes on from what is in {partial}")
            raise KeyboardInterrupt from end
        journal.remove()
    return _report(work, dst, journal, changes, progress)


def _prepare(src: Path, output: Format, options: Options, progress: Progress) -> _Work:
    """Read headers, join the layouts, check that they fit; nothing is written."""
    source = open_weights(src, options.reference, options.allow_missing, options.allow_remote_code)
    for name in source.skipped:
        progress.say(f"left out as --allow-missing says: {name}")
    wanted = wanted_layout(source, output)
    budget = memory_budget(options.memory_limit, options.workers, wanted)
    check_homes(source.store, budget.block_bytes)
    if not wanted.shapes:
        raise UserError(f"{src}: no tensor is left to convert after --allow-missing")
    plan = make_plan([source.store.layout], [wanted])
    dtypes = target_dtypes(source, wanted, plan.copies, options.dtype)
    target: Target
    if isinstance(wanted, DistLayout):
        target = DistTarget(wanted, dtypes, budget.block_bytes, options.max_shard_size)
    else:
        target = HFTarget(source.spec, wanted, dtypes, budget.block_bytes, options.max_shard_size)
    job = Job(source, output, options, budget.block_bytes, plan.digest)
    return _Work(job, target, Gather(source.store, wanted, plan.copies, dtypes), budget.workers)


def _write_weights(work: _Work, dst: Path, journal: Journal, progress: Progress) -> None:
    files = work.target.files()
    total, done = sum(files.values()), sum(files[file] for file in journal.done)
    check_disk(dst, total - done)
    progress.start(total, done)
    FileWriter(journal.folder, work.target, work.gather, journal, progress, work.workers).write_all()
    if not work.job.is_unchanged():
        raise RunFailure(
            f"{work.job.source.store.folder} was changed while it was converted; convert it again with --restart"
        )


def _write_the_rest(work: _Work, folder: Path, journal: Journal) -> list[str]:
    """Everything but weights, the index last. Returns what was changed in config.json."""
    job, hf = work.job, work.job.output == "hf"
    changes = copy_sidecar(job.source.sidecar, folder if hf else folder / SIDECAR, job.options.dtype)
    write_manifest(folder / (HF_MANIFEST if hf else DIST_MANIFEST), job, journal.done.values(), changes)
    work.target.finish(folder, [journal.done[file] for file in work.target.files()])
    return changes


def _report(work: _Work, dst: Path, journal: Journal, changes: list[str], progress: Progress) -> Result:
    not_finite = not_finite_values(journal.done.values())
    for line in changes:
        progress.say(line)
    for name, count in not_finite.items():
        progress.say(
            f"warning: {name} has {count} values that are NaN or infinite; they are copied as they are"
        )
    files = work.target.files()
    return Result(dst, len(files), sum(files.values()), work.job.source.skipped, tuple(changes), not_finite)
