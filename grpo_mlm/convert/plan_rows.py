"""The lines of a plan's table: one for each tensor of a target, or one for each kind of tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from grpo_mlm.layouts.boxes import Layout, volume
from grpo_mlm.layouts.weights import Shape, full

# Numbers of layers, experts and chunks: between dots, at the end of a grouped expert's weight, after "chunk".
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.weight)\d+$|(?<=^chunk)\d+(?=\.)")


@dataclass(frozen=True)
class Row:
    """One tensor of a target as all `ranks` hold it, or several of a kind, numbers in their names being `*`.

    `sources` are the stored tensors that it is made of. Bytes are those of all ranks together.
    """

    tensor: str
    count: int
    ranks: tuple[int, ...]
    shape: Shape
    dtype: str
    sources: tuple[str, ...]
    bytes: int  # padding included
    padding_bytes: int


def rows_of(
    layout: Layout,
    own_shapes: Mapping[str, Shape],
    homes: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype],
    ranks: tuple[int, ...],
) -> list[Row]:
    """One row a tensor. `own_shapes` are the tensors' shapes to show, which may have more axes than the layout's;
    `homes` is the stored tensor that holds each canonical one."""
    sources: dict[str, dict[str, None]] = {name: {} for name in layout.shapes}
    for piece in layout.pieces:
        sources[piece.local][homes[piece.tensor]] = None
    padding = dict.fromkeys(layout.shapes, 0)
    for name, box in layout.fills:
        padding[name] += volume(box)
    return [
        Row(
            tensor=name,
            count=len(ranks),
            ranks=ranks,
            shape=own_shapes[name],
            dtype=str(dtypes[name]).removeprefix("torch."),
            sources=tuple(sources[name]),
            bytes=len(ranks) * volume(full(shape)) * dtypes[name].itemsize,
            padding_bytes=len(ranks) * padding[name] * dtypes[name].itemsize,
        )
        for name, shape in layout.shapes.items()
    ]


def by_kind(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ in nothing but numbers in their names, and in who holds them, as one."""
    kinds: dict[tuple[str, Shape, str], Row] = {}
    for row in rows:
        key = (_kind(row.tensor), row.shape, row.dtype)
        sources = tuple(map(_kind, row.sources))
        one = kinds.get(
            key, replace(row, tensor=key[0], sources=(), count=0, ranks=(), bytes=0, padding_bytes=0)
        )
        kinds[key] = replace(
            one,
            count=one.count + row.count,
            ranks=tuple(sorted({*one.ranks, *row.ranks})),
            sources=tuple(dict.fromkeys((*one.sources, *sources))),
            bytes=one.bytes + row.bytes,
            padding_bytes=one.padding_bytes + row.padding_bytes,
        )
    return list(kinds.values())


def _kind(name: str) -> str:
    return _NUMBER.sub("*", name)
