"""Which file of a Hugging Face folder holds which tensor: read it, and lay a new set of files out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_mlm.bridge.durable import sync
from grpo_mlm.bridge.safetensors_header import Stored, read_header
from grpo_mlm.bridge.safetensors_stream import Plain, file_order
from grpo_mlm.errors import UserError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def tensor_files(folder: Path) -> dict[str, Path]:
    """File of every tensor, from the index or from the single file's header.

    UserError: no safetensors weights, a damaged index or header, or files that the index names but are absent.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        return dict.fromkeys(read_header(folder / SINGLE), folder / SINGLE)
    if not index.is_file():
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights can be read")
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is not a valid safetensors index: {error!r}") from error
    outside = sorted({str(file) for file in names.values() if Path(file).name != file})
    if outside:
        raise UserError(f"{index} names files outside of its folder: {', '.join(outside)}")
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise UserError(f"{index} names files that are not there: {', '.join(absent)}")
    return files


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder, from the headers of its files.

    UserError as `tensor_files`, and: a damaged file, one without a tensor that the index says it has, or one with
    a tensor that the index knows nothing of.
    """
    files = tensor_files(folder)
    headers = {path: read_header(path) for path in dict.fromkeys(files.values())}
    for name, path in files.items():
        if name not in headers[path]:
            raise UserError(f"{path}: has no tensor {name}, though the index says so")
    for path, tensors in headers.items():
        for name in tensors:
            if files.get(name) != path:
                raise UserError(f"{path}: holds tensor {name}, which the index does not say")
    return {name: headers[path][name] for name, path in files.items()}


def pack_files(tensors: Mapping[str, Plain], max_file_bytes: int) -> dict[str, dict[str, Plain]]:
    """Tensors by file, in the order to write them; a file exceeds `max_file_bytes` only by a tensor of that size."""
    groups: list[dict[str, Plain]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_file_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = tensor
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: file_order(groups[0])}
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": file_order(group)
        for i, group in enumerate(groups, 1)
    }


def write_index(folder: Path, files: Mapping[str, Mapping[str, Plain]]) -> None:
    """The index of several files; one file needs none."""
    if list(files) == [SINGLE]:
        return
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    sync(folder / INDEX)


def index_names(folder: Path) -> Sequence[str]:
    """Names of the folder's tensors; none where it has no safetensors weights."""
    there = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    return tuple(tensor_files(folder)) if there else ()
