"""What a conversion would do, from headers alone: every tensor with where it comes from, bytes, padding, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_mlm.bridge.hf_store import without
from grpo_mlm.convert.dtypes import target_dtypes
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import Options
from grpo_mlm.convert.plan_rows import Row, rows_of
from grpo_mlm.convert.plan_targets import FILES, Target, rank_layouts
from grpo_mlm.convert.resources import memory_budget
from grpo_mlm.convert.target import DistTarget, Format, HFTarget
from grpo_mlm.convert.wanted import wanted_layout
from grpo_mlm.convert.workers import BLOCKS_IN_FLIGHT
from grpo_mlm.layouts.boxes import Layout, volume
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron_dist import DistLayout, dist_layout
from grpo_mlm.layouts.model import canonical_tensors
from grpo_mlm.layouts.planner import make_plan
from grpo_mlm.layouts.planner.copies import Copy
from grpo_mlm.layouts.weights import full

BASE_MEMORY = 300 * 10**6
"""Python and its libraries."""


@dataclass(frozen=True)
class Source:
    """What is there. `missing` and `unexpected` are names that no pattern of `--allow-missing` lets pass."""

    path: Path
    kind: str
    family: str
    tensors: int
    dtypes: dict[str, int]  # dtype -> bytes
    files: dict[str, int]  # file -> bytes
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    allowed: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum(self.dtypes.values())


@dataclass(frozen=True)
class RankTotals:
    """What each of some ranks holds; they are replicas of one another."""

    ranks: tuple[int, ...]
    tensors: int
    bytes: int  # padding included
    padding_bytes: int


@dataclass(frozen=True)
class TargetPlan:
    """What a target would hold. `seconds` is None where nothing is written, `digest` where the names do not fit."""

    target: Target
    rows: tuple[Row, ...]
    ranks: tuple[RankTotals, ...]
    files: dict[str, int]
    read_bytes: int
    peak_memory_bytes: int
    seconds: float | None
    digest: str | None

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    @property
    def padding_bytes(self) -> int:
        return sum(row.padding_bytes for row in self.rows)


def describe_source(weights: Weights, allow_missing: Sequence[str]) -> Source:
    """The source's side of the report; `weights` were opened with all names allowed to differ."""
    store = weights.store
    dtypes: dict[str, int] = {}
    for name, shape in store.layout.shapes.items():
        dtype = store.dtype(name)
        dtypes[_name(dtype)] = dtypes.get(_name(dtype), 0) + volume(full(shape)) * dtype.itemsize
    wanted = canonical_tensors(weights.spec)
    missing = wanted.keys() - {piece.tensor for piece in store.layout.pieces}
    unexpected = (
        set(weights.skipped) - hf_layout(weights.spec, weights.hf_names).shapes.keys() - wanted.keys()
    )
    allowed = {name for name in missing | unexpected if weights.passes(name, allow_missing)}
    return Source(
        path=store.folder,
        kind=weights.kind,
        family=weights.spec.family,
        tensors=len(store.layout.shapes),
        dtypes=dtypes,
        files={path.name: path.stat().st_size for path in store.files()},
        missing=tuple(name for name in wanted if name in missing - allowed),
        unexpected=tuple(sorted(unexpected - allowed)),
        allowed=tuple(sorted(allowed)),
    )


def plan_target(
    weights: Weights, source: Source, target: Target, options: Options, disk_speed: int
) -> TargetPlan:
    """Join the source with one target. `disk_speed`: bytes a second, for reading and writing together.

    UserError where the model cannot be cut as the target asks; NamesDiffer and OutOfResources as the conversion.
    """
    homes = {piece.tensor: piece.local for piece in reversed(weights.store.layout.pieces)}
    fits = not (source.missing or source.unexpected)
    ranks: dict[int, list[int]] = {}  # by layout, which replicas share
    layouts: dict[int, Layout] = {}
    for rank, layout in enumerate(_layouts(weights, target, fits)):
        ranks.setdefault(id(layout), []).append(rank)
        layouts[id(layout)] = layout
    rows: list[Row] = []
    totals: list[RankTotals] = []
    read = 0
    for key, layout in layouts.items():
        mine = _rows(weights, layout, homes, options, tuple(ranks[key]))
        rows += mine
        totals.append(_totals(mine, tuple(ranks[key])))
        read += len(ranks[key]) * sum(
            volume(piece.box) * weights.store.dtype(homes[piece.tensor]).itemsize
            for piece in layout.pieces
            if piece.tensor in homes
        )
    written = sum(row.bytes for row in rows)
    is_files = target.kind in FILES
    whole = homes.keys() == canonical_tensors(weights.spec).keys()
    return TargetPlan(
        target=target,
        rows=tuple(rows),
        ranks=() if is_files else tuple(totals),
        files=_files(weights, layout, rows, options) if is_files else {},
        read_bytes=read,
        peak_memory_bytes=_peak_memory(layout, written, options)
        if is_files
        else max(t.bytes for t in totals),
        seconds=(read + written) / disk_speed if is_files else None,
        digest=make_plan([weights.store.layout], list(layouts.values())).digest if whole else None,
    )


def _layouts(weights: Weights, target: Target, fits: bool) -> list[Layout]:
    """Of each rank of the target; one for a set of files, less what the source is allowed to lack."""
    if target.kind in FILES:
        output: Format = "hf" if target.kind == "hf" else "torch_dist"
        if fits:
            return [wanted_layout(weights, output)]
        return [hf_layout(weights.spec, weights.hf_names) if output == "hf" else dist_layout(weights.spec)]
    return rank_layouts(target, weights.spec)


def _rows(
    weights: Weights, layout: Layout, homes: Mapping[str, str], options: Options, ranks: tuple[int, ...]
) -> list[Row]:
    """One row a tensor, but for those of which the source lacks a part."""
    short = {piece.local for piece in layout.pieces if piece.tensor not in homes}
    held = without(layout, short)
    copies = (
        Copy(piece.tensor, piece.box, 0, homes[piece.tensor], piece.box, 0, piece.local, piece.local_box)
        for piece in held.pieces
    )
    filled = without(held, held.shapes.keys() - {piece.local for piece in held.pieces})
    dtypes = target_dtypes(weights, filled, copies, options.dtype)
    usual = next(iter(dtypes.values()), torch.float32)  # of a tensor that is nothing but padding
    own_shapes = layout.stored if isinstance(layout, DistLayout) else layout.shapes
    return rows_of(held, own_shapes, homes, {name: dtypes.get(name, usual) for name in held.shapes}, ranks)


def _totals(rows: Sequence[Row], ranks: tuple[int, ...]) -> RankTotals:
    each = len(ranks)
    padding = sum(row.padding_bytes for row in rows)
    return RankTotals(ranks, len(rows), sum(row.bytes for row in rows) // each, padding // each)


def _files(weights: Weights, layout: Layout, rows: Sequence[Row], options: Options) -> dict[str, int]:
    """Bytes of tensors in each file that would be written; none where tensors are missing."""
    dtypes = {row.tensor: getattr(torch, row.dtype) for row in rows}
    if dtypes.keys() != layout.shapes.keys():
        return {}
    block = memory_budget(options.memory_limit, options.workers, layout).block_bytes
    if isinstance(layout, DistLayout):
        return DistTarget(layout, dtypes, block, options.max_shard_size).files()
    return HFTarget(weights.spec, layout, dtypes, block, options.max_shard_size).files()


def _peak_memory(layout: Layout, written: int, options: Options) -> int:
    """Of the conversion: what its blocks take, on top of Python and its libraries."""
    budget = memory_budget(options.memory_limit, options.workers, layout)
    return BASE_MEMORY + min(written, budget.workers * BLOCKS_IN_FLIGHT * budget.block_bytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
