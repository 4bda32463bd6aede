"""Hugging Face files -> one rank's local tensors, reading only the slices that the rank holds."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from grpo_mlm.errors import RunFailure, UserError
from grpo_mlm.layouts.boxes import Layout, Piece, slices
from grpo_mlm.layouts.hf import HEAD
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec
from grpo_mlm.layouts.spec import ModelSpec

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = ("F64", "F32", "F16", "BF16")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


def hub_folder(path: str | Path) -> Path:
    """The local folder of a model: `path` itself, or the snapshot of a hub id, downloaded on first use.

    UserError: neither a folder nor a hub id, or a hub id that cannot be had (no such model, no network).
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"model path {path} is a file, expected a folder in Hugging Face format")
    if not _HUB_ID.fullmatch(str(path)):
        raise UserError(f"model folder {path} does not exist")
    from huggingface_hub import snapshot_download  # heavy, and most paths are local

    try:
        return Path(snapshot_download(str(path), allow_patterns=_HUB_FILES))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's kinds
        raise UserError(
            f"model {path!r} is no local folder, and the hub did not give it: {type(error).__name__}: {error}"
        ) from error


def tensor_files(folder: Path) -> dict[str, Path]:
    """File of every tensor, from the index or from the single file's header.

    UserError: no safetensors weights, a damaged index or header, or files that the index names but are absent.
    """
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    if not index.is_file():
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors weights can be read")
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a valid safetensors index: {error!r}") from error
    absent = sorted({path.name for path in files.values() if not path.is_file()})
    if absent:
        raise UserError(f"{index} names files that are not there: {', '.join(absent)}")
    return files


def check_names(folder: Path, spec: ModelSpec) -> dict[str, Path]:
    """File of every tensor, with the set of tensors proven to be the one that config.json describes.

    UserError lists tensors that are missing, and tensors that this architecture has no use for. A tied model
    may carry its head as well; rotary tables that old tools wrote are ignored.
    """
    files = tensor_files(folder)
    wanted = canonical_tensors(spec).keys()
    ignored = {name for name in files if name.endswith("rotary_emb.inv_freq") or (spec.tied and name == HEAD)}
    problems = []
    for what, names in (
        ("missing", wanted - files.keys()),
        ("not in this model", files.keys() - wanted - ignored),
    ):
        if names:
            problems.append(f"{what}: {_some(sorted(names))}")
    if problems:
        raise UserError(
            f"{folder}: the weights do not match config.json ({spec.family}); {'; '.join(problems)}"
        )
    return files


def check_headers(folder: Path, spec: ModelSpec) -> None:
    """`check_names`, and every file's header: readable, whole, shapes as config.json has them, dtypes that train."""
    files = check_names(folder, spec)
    names: dict[Path, list[str]] = defaultdict(list)
    for name, path in files.items():
        names[path].append(name)
    shapes = canonical_tensors(spec)
    for path, inside in names.items():
        with _open(path) as file:
            for name in inside:
                if name in shapes:
                    _stored(file, path, name, shapes[name])


@torch.no_grad()
def load_layout(folder: Path, layout: Layout, params: dict[str, torch.Tensor]) -> None:
    """Fill one rank's tensors in place from a Hugging Face folder; padding becomes zero.

    `params` are the tensors that `layout` names, on any device; values are cast to their dtype. Only the bytes
    of this rank's slices are read. UserError, by name: tensors missing, of another shape, quantised.
    """
    _check_params(layout, params)
    spec = read_model_spec(folder)
    files, shapes = check_names(folder, spec), canonical_tensors(spec)
    by_file: dict[Path, list[Piece]] = defaultdict(list)
    for piece in layout.pieces:
        by_file[files[piece.tensor]].append(piece)
    for path, pieces in by_file.items():
        with _open(path) as file:
            _fill(file, path, pieces, shapes, params)
    for name, box in layout.fills:
        params[name][slices(box)].zero_()


def _fill(
    file: Any,
    path: Path,
    pieces: list[Piece],
    shapes: dict[str, tuple[int, ...]],
    params: dict[str, torch.Tensor],
) -> None:
    for piece in pieces:
        stored = _stored(file, path, piece.tensor, shapes[piece.tensor])
        params[piece.local][slices(piece.local_box)].copy_(stored[slices(piece.box)])


def _stored(file: Any, path: Path, name: str, wanted: tuple[int, ...]) -> Any:
    """A tensor of an open file, not read yet. UserError: not there, of another shape, quantised."""
    if name not in file.keys():  # noqa: SIM118 - the file is no mapping
        raise UserError(f"{path}: has no tensor {name}, though the index says so")
    stored = file.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if shape != wanted:
        raise UserError(f"{path}: {name} has shape {shape}, config.json means {wanted}")
    if dtype not in _DTYPES:
        raise UserError(f"{path}: {name} is stored as {dtype}; only {', '.join(_DTYPES)} can be trained")
    return stored


def _check_params(layout: Layout, params: dict[str, torch.Tensor]) -> None:
    """RunFailure where the model that was built is not the one that the layout describes."""
    odd = sorted(layout.shapes.keys() ^ params.keys())
    if odd:
        raise RunFailure(f"the model and its layout name different tensors: {_some(odd)}")
    for name, shape in layout.shapes.items():
        if tuple(params[name].shape) != shape:
            raise RunFailure(
                f"{name} has shape {tuple(params[name].shape)} in the model, {shape} in its layout"
            )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not a readable safetensors file: {error}") from error


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
