"""Trainer ranks -> a Hugging Face folder, one file at a time: rank 0 writes, the others send their pieces.

A plan like any other: its sources are the trainer ranks, its one destination is the set of files.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_mlm.bridge.durable import NewFile, copy_files, publish, side_files
from grpo_mlm.bridge.hf_index import pack_files, tensor_files, write_index
from grpo_mlm.bridge.hf_store import file_shape
from grpo_mlm.bridge.safetensors_stream import Plain, SafetensorsWriter
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout, slices
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.model import ModelSpec, float32_tensors
from grpo_mlm.layouts.planner import Copy, make_plan

MAX_FILE_BYTES = 5 << 30


@torch.no_grad()
def export_hf(
    out: Path,
    model_folder: Path,
    spec: ModelSpec,
    layouts: Sequence[Layout],
    rank: int,
    params: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write the model that all ranks of `group` hold together as the folder `out`. Every rank calls it.

    `layouts[r]` is rank r's layout, `params` this rank's tensors by local name, all of one dtype, which the
    files keep; but for those that the family holds in float32. The tensors are those of `model_folder`, its other
    files are copied byte for byte. The folder is written aside and renamed; RunFailure if it is already there. Rank 0
    holds one tensor in memory at a time.
    """
    _refuse_existing(out, rank, len(layouts), group)
    target = hf_layout(spec, tensor_files(model_folder).keys())
    by_tensor: dict[str, list[Copy]] = defaultdict(list)
    for copy in make_plan(layouts, [target]).copies:
        by_tensor[copy.dst_local].append(copy)
    if rank != 0:
        for name in target.shapes:
            _send(by_tensor[name], rank, params, group)
    else:
        _write(out, model_folder, spec, target, by_tensor, params, group, max_file_bytes)
    if len(layouts) > 1:
        dist.barrier(group=group)


def _refuse_existing(out: Path, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
    """RunFailure on every rank, or none would tell the senders that nobody receives."""
    there = [rank == 0 and out.exists()]
    if world > 1:
        dist.broadcast_object_list(there, group=group, group_src=0)
    if there[0]:
        raise RunFailure(f"{out} is already there; it is not overwritten")


def _send(
    copies: list[Copy], rank: int, params: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
) -> None:
    for copy in copies:
        if copy.src == rank:
            dist.send(params[copy.src_local][slices(copy.src_box)].contiguous(), group=group, group_dst=0)


def _write(
    out: Path,
    model_folder: Path,
    spec: ModelSpec,
    target: Layout,
    by_tensor: Mapping[str, list[Copy]],
    params: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
    max_file_bytes: int,
) -> None:
    """Rank 0: receive tensor after tensor, write file after file, then everything that is not weights."""
    aside = out.with_name(out.name + ".tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = {n: Plain(_dtype(spec, n, params), file_shape(spec, n, s)) for n, s in target.shapes.items()}
    files = pack_files(tensors, max_file_bytes)
    for file, inside in files.items():
        with NewFile(aside / file) as stream:
            writer = SafetensorsWriter(stream, inside)
            for name in inside:
                tensor = torch.empty(target.shapes[name], dtype=tensors[name].dtype)
                _receive(tensor, by_tensor[name], params, group)
                writer.write(tensor)
            writer.close()
    write_index(aside, files)
    copy_files(side_files(model_folder), aside)
    publish(aside, out)


def _dtype(spec: ModelSpec, name: str, params: Mapping[str, torch.Tensor]) -> torch.dtype:
    if name in float32_tensors(spec):
        return torch.float32
    return next(tensor.dtype for tensor in params.values() if tensor.dim() > 1)


def _receive(
    tensor: torch.Tensor,
    copies: list[Copy],
    params: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup | None,
) -> None:
    """Fill one whole canonical tensor on the host."""
    device = next(iter(params.values())).device
    for copy in copies:
        if copy.src == 0:
            piece = params[copy.src_local][slices(copy.src_box)]
        else:
            extents = [stop - start for start, stop in copy.box]
            piece = torch.empty(extents, dtype=tensor.dtype, device=device)
            dist.recv(piece, group=group, group_src=copy.src)
        tensor[slices(copy.dst_box)].copy_(piece)
