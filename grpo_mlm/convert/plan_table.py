"""A plan as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from grpo_mlm.convert.plan_report import RankTotals, Source, TargetPlan
from grpo_mlm.convert.plan_rows import Row, by_kind
from grpo_mlm.convert.text import printable, show_seconds, show_size

Detail = Literal["tensors", "kinds", "summary"]
FORMAT_VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes away."""
SHOWN, SHOWN_SPANS = 12, 4
"""Groups of ranks and names, and runs of ranks, that the text lists; of more it tells the number."""


def as_json(source: Source, plans: Sequence[TargetPlan], detail: Detail, disk_speed: int) -> dict[str, Any]:
    """All of the plan, in JSON values; sizes are bytes."""
    names = {name: list(getattr(source, name)) for name in ("missing", "unexpected", "allowed")}
    return {
        "format_version": FORMAT_VERSION,
        "source": {
            "path": str(source.path),
            "kind": source.kind,
            "family": source.family,
            "tensors": source.tensors,
            "bytes": source.bytes,
            "dtypes": source.dtypes,
            "files": source.files,
        },
        "names": names,
        "assumed_disk_bytes_per_second": disk_speed,
        "targets": [_target(plan, detail) for plan in plans],
    }


def _target(plan: TargetPlan, detail: Detail) -> dict[str, Any]:
    return {
        "target": plan.target.text,
        "kind": plan.target.kind,
        "bytes": plan.bytes,
        "padding_bytes": plan.padding_bytes,
        "read_bytes": plan.read_bytes,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "seconds": plan.seconds,
        "plan_digest": plan.digest,
        "files": plan.files,
        "ranks": [asdict(one) for one in plan.ranks],
        "tensors": [asdict(row) for row in _rows(plan, detail)],
    }


def _rows(plan: TargetPlan, detail: Detail) -> list[Row]:
    """What the chosen detail shows."""
    if detail == "summary":
        return []
    return list(plan.rows) if detail == "tensors" else by_kind(plan.rows)


def show(
    source: Source, plans: Sequence[TargetPlan], detail: Detail, disk_speed: int
) -> Iterator[str | Table]:
    """Lines and tables for people."""
    dtypes = ", ".join(f"{show_size(n)} {dtype}" for dtype, n in source.dtypes.items())
    yield (
        f"source {source.path} ({source.kind}, {source.family}): {source.tensors} tensors, "
        f"{show_size(source.bytes)} ({dtypes}), {_count(len(source.files), 'file')}"
    )
    for what, names in (
        ("missing: the model has them, the source does not", source.missing),
        ("unexpected: the source has them, the model does not", source.unexpected),
        ("left out, as --allow-missing says", source.allowed),
    ):
        if names:
            yield f"  {what}: {len(names)}"
            yield from _list([f"    {name}" for name in names])
    for plan in plans:
        yield ""
        yield from _show_target(plan, detail, disk_speed)


def _show_target(plan: TargetPlan, detail: Detail, disk_speed: int) -> Iterator[str | Table]:
    padding = f", {show_size(plan.padding_bytes)} of it padding" if plan.padding_bytes else ""
    where = f"{_count(sum(len(one.ranks) for one in plan.ranks), 'rank')}" if plan.ranks else ""
    where = where or _count(len(plan.files), "file")
    yield f"target {plan.target.text}: {show_size(plan.bytes)} in {where}{padding}"
    rows = _rows(plan, detail)
    if rows:
        yield _table(rows, with_ranks=bool(plan.ranks))
    if plan.files and detail != "summary":
        first, *others = plan.files
        more = f" to {others[-1]}, at most" if others else ","
        yield printable(f"  {first}{more} {show_size(max(plan.files.values()))}")
    if plan.ranks:
        yield from _list([_rank_line(one) for one in _alike(plan.ranks)])
        yield f"  largest rank: {show_size(plan.peak_memory_bytes)} of weights"
    if plan.seconds is not None:
        yield (
            f"  reads {show_size(plan.read_bytes)}, writes {show_size(plan.bytes)}; "
            f"peak memory about {show_size(plan.peak_memory_bytes)}"
        )
        yield (
            f"  takes {show_seconds(plan.seconds)}, if the disks move {show_size(disk_speed)} a second, reading and "
            "writing together (an assumption, not measured: --disk-speed)"
        )


def _table(rows: Sequence[Row], with_ranks: bool) -> Table:
    table = Table(show_edge=False, pad_edge=False, box=None, header_style="bold")
    for head in ("tensor", "made of", "shape", "dtype"):
        table.add_column(head, overflow="fold")
    for head in ("count", *(["ranks"] if with_ranks else []), "size", "padding"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            row.tensor,
            "\n".join(row.sources) or "nothing",
            " x ".join(map(str, row.shape)),
            row.dtype,
            str(row.count),
            *([spans(row.ranks)] if with_ranks else []),
            show_size(row.bytes),
            show_size(row.padding_bytes) if row.padding_bytes else "",
        ]
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _alike(ranks: Sequence[RankTotals]) -> list[RankTotals]:
    """Ranks that hold equally much, as one entry."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for one in ranks:
        groups.setdefault((one.tensors, one.bytes, one.padding_bytes), []).extend(one.ranks)
    return [RankTotals(tuple(sorted(members)), *numbers) for numbers, members in groups.items()]


def _rank_line(one: RankTotals) -> str:
    each = " each" if len(one.ranks) > 1 else ""
    padding = f", {show_size(one.padding_bytes)} of it padding" if one.padding_bytes else ""
    ranks = "ranks" if each else "rank"
    return f"  {ranks} {spans(one.ranks)}: {one.tensors} tensors, {show_size(one.bytes)}{each}{padding}"


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 as `0-2,5`; the first few of many."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][1] == n - 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    text = ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts[:SHOWN_SPANS])
    return text if len(parts) <= SHOWN_SPANS else f"{text},... ({len(numbers)})"


def _list(lines: Sequence[str]) -> Iterator[str]:
    yield from map(printable, lines[:SHOWN])
    if len(lines) > SHOWN:
        yield f"  and {len(lines) - SHOWN} more (--json lists all)"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
