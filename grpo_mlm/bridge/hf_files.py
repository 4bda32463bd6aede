"""Hugging Face files -> one rank's local tensors, reading only the slices that the rank holds."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from grpo_mlm.bridge.hf_store import HFStore, some
from grpo_mlm.errors import RunFailure, UserError
from grpo_mlm.layouts.boxes import Layout, matrix_shape, slices
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.spec import ModelSpec

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


def check_headers(folder: Path, spec: ModelSpec) -> None:
    """UserError unless the weights are whole, by their headers, and those that config.json describes."""
    HFStore(folder, spec)


@torch.no_grad()
def load_layout(folder: Path, layout: Layout, params: dict[str, torch.Tensor]) -> None:
    """Fill one rank's tensors in place from a Hugging Face folder; padding becomes zero.

    `params` are the tensors that `layout` names, on any device; values are cast to their dtype. Only the bytes
    of this rank's slices are read. UserError, by name: tensors missing, of another shape, quantised.
    """
    _check_params(layout, params)
    store = HFStore(folder, read_model_spec(folder))
    matrices = {name: params[name].view(shape) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        matrices[piece.local][slices(piece.local_box)].copy_(store.read_canonical(piece.tensor, piece.box))
    for name, box in layout.fills:
        matrices[name][slices(box)].zero_()


def _check_params(layout: Layout, params: dict[str, torch.Tensor]) -> None:
    """RunFailure where the model that was built is not the one that the layout describes."""
    odd = sorted(layout.shapes.keys() ^ params.keys())
    if odd:
        raise RunFailure(f"the model and its layout name different tensors: {some(odd)}")
    for name, shape in layout.shapes.items():
        if matrix_shape(tuple(params[name].shape)) != shape:
            raise RunFailure(
                f"{name} has shape {tuple(params[name].shape)} in the model, {shape} in its layout"
            )
