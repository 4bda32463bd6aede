"""What a conversion would do, from headers alone: every tensor with where it comes from, bytes, padding, files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import reduce
from pathlib import Path

import torch

from grpo_mlm.bridge.hf_store import without
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import TORCH_DTYPES, Options
from grpo_mlm.convert.plan_rows import Row, rows_of
from grpo_mlm.convert.plan_targets import FILES, Target, rank_layouts
from grpo_mlm.convert.resources import memory_budget
from grpo_mlm.convert.target import DistTarget, HFTarget
from grpo_mlm.convert.workers import BLOCKS_IN_FLIGHT
from grpo_mlm.layouts.boxes import Layout, volume
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron_dist import DistLayout, dist_layout
from grpo_mlm.layouts.model import canonical_tensors
from grpo_mlm.layouts.planner import make_plan
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
    allowed = {x for x in missing | unexpected if any(fnmatchcase(x, pattern) for pattern in allow_missing)}
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


def plan_target(weights: Weights, target: Target, options: Options, disk_speed: int) -> TargetPlan:
    """Join the source with one target. `disk_speed`: bytes a second, for reading and writing together.

    UserError where the model cannot be cut as the target asks.
    """
    homes = {piece.tensor: piece.local for piece in reversed(weights.store.layout.pieces)}
    ranks: dict[int, list[int]] = {}  # by layout, which replicas share
    layouts: dict[int, Layout] = {}
    for rank, layout in enumerate(_layouts(weights, target)):
        ranks.setdefault(id(layout), []).append(rank)
        layouts[id(layout)] = layout
    rows: list[Row] = []
    totals: list[RankTotals] = []
    read = 0
    for key, layout in layouts.items():
        each, held = len(ranks[key]), _without_missing(layout, homes.keys())
        mine = rows_of(held, homes, _dtypes(weights, held, homes, options), tuple(ranks[key]))
        rows += mine
        totals.append(
            RankTotals(
                ranks=tuple(ranks[key]),
                tensors=len(mine),
                bytes=sum(row.bytes for row in mine) // each,
                padding_bytes=sum(row.padding_bytes for row in mine) // each,
            )
        )
        read += each * sum(
            volume(piece.box) * weights.store.dtype(homes[piece.tensor]).itemsize for piece in held.pieces
        )
    written = sum(row.bytes for row in rows)
    is_files = target.kind in FILES
    complete = homes.keys() == canonical_tensors(weights.spec).keys()
    return TargetPlan(
        target=target,
        rows=tuple(rows),
        ranks=() if is_files else tuple(totals),
        files=_files(weights, held, homes, options) if is_files else {},
        read_bytes=read,
        peak_memory_bytes=_peak_memory(held, written, options)
        if is_files
        else max(one.bytes for one in totals),
        seconds=(read + written) / disk_speed if is_files else None,
        digest=make_plan([weights.store.layout], list(layouts.values())).digest if complete else None,
    )


def _layouts(weights: Weights, target: Target) -> list[Layout]:
    """Of each rank of the target; one for a set of files."""
    if target.kind == "hf":
        return [hf_layout(weights.spec, weights.hf_names)]
    if target.kind == "dist":
        return [dist_layout(weights.spec)]
    return rank_layouts(target, weights.spec)


def _without_missing(layout: Layout, known: Collection[str]) -> Layout:
    """The layout less the tensors that need what the source has not."""
    short = {piece.local for piece in layout.pieces if piece.tensor not in known}
    if not short:
        return layout
    kept = without(layout, short)
    return replace(layout, shapes=kept.shapes, pieces=kept.pieces, fills=kept.fills)


def _dtypes(
    weights: Weights, layout: Layout, homes: Mapping[str, str], options: Options
) -> dict[str, torch.dtype]:
    """Of each tensor of the target: the one asked for, else one that holds all that goes into it."""
    if options.dtype != "keep":
        return dict.fromkeys(layout.shapes, TORCH_DTYPES[options.dtype])
    parts: dict[str, set[torch.dtype]] = {name: set() for name in layout.shapes}
    for piece in layout.pieces:
        parts[piece.local].add(weights.store.dtype(homes[piece.tensor]))
    usual = next(iter(weights.store.layout.shapes))
    return {
        name: reduce(torch.promote_types, found) if found else weights.store.dtype(usual)
        for name, found in parts.items()
    }


def _files(weights: Weights, layout: Layout, homes: Mapping[str, str], options: Options) -> dict[str, int]:
    """Bytes of tensors in each file that would be written."""
    dtypes = _dtypes(weights, layout, homes, options)
    block = memory_budget(options.memory_limit, options.workers, layout).block_bytes
    if isinstance(layout, DistLayout):
        return DistTarget(layout, dtypes, block, options.max_shard_size).files()
    return HFTarget(layout, dtypes, block, options.max_shard_size).files()


def _peak_memory(layout: Layout, written: int, options: Options) -> int:
    """Of the conversion: what its blocks take, on top of Python and its libraries."""
    budget = memory_budget(options.memory_limit, options.workers, layout)
    return BASE_MEMORY + min(written, budget.workers * BLOCKS_IN_FLIGHT * budget.block_bytes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
