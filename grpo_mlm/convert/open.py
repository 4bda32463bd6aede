"""Opens weights of whatever format a path holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from grpo_mlm.bridge.dist_store import DistStore
from grpo_mlm.bridge.hf_files import hub_folder
from grpo_mlm.bridge.hf_index import index_names
from grpo_mlm.bridge.hf_store import HFStore
from grpo_mlm.bridge.store import TensorStore
from grpo_mlm.convert.sidecar import refuse_remote_code
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.model import ModelSpec, canonical_tensors, read_model_spec

Kind = Literal["hf", "torch_dist", "megatron"]
SIDECAR = "hf"
"""Subfolder of our torch_dist checkpoints with the config and the tokenizer."""
DIST_MANIFEST = "manifest.json"
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Weights:
    """Stored weights and what goes with them.

    `sidecar` is the folder with config.json and the tokenizer. `hf_names` are the names of the Hugging Face tensors
    that are not spelt as on the hub: a tied head that is written out, fused experts. `skipped` are names that differ
    from the model's and were allowed to, `keys_of` what they are called in the files where that is another name.
    """

    spec: ModelSpec
    store: TensorStore
    sidecar: Path
    kind: Kind
    hf_names: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    keys_of: Mapping[str, str] = field(default_factory=dict)

    def passes(self, name: str, patterns: Iterable[str]) -> bool:
        """Whether a glob pattern matches a name that differs, or the key under which this format would store it."""
        spelt = (name, self.keys_of.get(name, name))
        return any(fnmatchcase(one, pattern) for pattern in patterns for one in spelt)


def open_weights(
    path: Path,
    reference: Path | None = None,
    allow_missing: Sequence[str] = (),
    allow_remote_code: bool = False,
) -> Weights:
    """The weights at `path`: a Hugging Face folder or hub id, a torch_dist folder, or a Megatron save root.

    `reference` is the Hugging Face folder of the config and the tokenizer where the checkpoint does not carry them.
    UserError: none of these, an adapter, remote code (unless allowed), files that are damaged. NamesDiffer: tensors
    missing or unknown, unless a pattern of `allow_missing` matches their names.
    """
    folder = _iteration(path)
    if folder is not None:
        return _open_megatron(folder, reference, allow_missing, allow_remote_code, path)
    folder = hub_folder(path)
    refuse_remote_code(folder, allow_remote_code)
    spec = read_model_spec(folder)
    store = HFStore(folder, spec, allow_missing)
    return Weights(spec, store, folder, "hf", _odd_names(spec, store.layout.shapes), store.skipped)


def _iteration(path: Path) -> Path | None:
    """The checkpoint folder that `path` is or points to; None where it is no Megatron checkpoint.

    UserError: a save root whose iteration is not there.
    """
    tracker = path / _TRACKER
    if not tracker.is_file():
        return path if is_dist_checkpoint(path) else None
    step = tracker.read_text(encoding="utf-8", errors="replace").strip()
    if step != "release" and not step.isdecimal():
        raise UserError(f"{tracker} says {step[:40]!r}, expected a number or 'release'")
    folder = path / (step if step == "release" else f"iter_{int(step):07d}")
    if not is_dist_checkpoint(folder):
        raise UserError(
            f"{tracker} points to {folder.name}, which is not there or no torch_dist checkpoint "
            "(no metadata.json that says so); save it with --ckpt-format torch_dist"
        )
    return folder


def is_dist_checkpoint(folder: Path) -> bool:
    """Whether a folder's metadata.json says sharded_backend torch_dist."""
    try:
        said = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(said, dict) and said.get("sharded_backend") == "torch_dist"


def _open_megatron(
    folder: Path, reference: Path | None, allow_missing: Sequence[str], allow_remote_code: bool, path: Path
) -> Weights:
    """`path`: what the user named, of which `folder` is the checkpoint."""
    sidecar = reference or folder / SIDECAR
    if not (sidecar / "config.json").is_file():
        raise UserError(
            f"{folder} does not carry the model's config ({SIDECAR}/config.json); "
            "pass --reference with a Hugging Face folder of this model"
            if reference is None
            else f"--reference {reference} has no config.json; name a Hugging Face folder of this model"
        )
    refuse_remote_code(sidecar, allow_remote_code)
    spec = read_model_spec(sidecar)
    names = index_names(sidecar) if reference else _noted_names(folder / DIST_MANIFEST)
    store = DistStore(folder, spec, allow_missing)
    kind: Kind = "torch_dist" if folder == path else "megatron"
    return Weights(spec, store, sidecar, kind, _odd_names(spec, names), store.skipped, store.keys_of)


def _noted_names(manifest: Path) -> Sequence[str]:
    """Names that the Hugging Face folder had which a checkpoint was made from."""
    try:
        names = json.loads(manifest.read_text(encoding="utf-8")).get("hf_names", [])
    except FileNotFoundError:
        return ()
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{manifest} is damaged: {error}; convert the checkpoint again") from error
    return [str(name) for name in names]


def _odd_names(spec: ModelSpec, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(names) - canonical_tensors(spec).keys()))
