"""Folders that appear whole or not at all, however many processes make them at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_mlm.errors import UserError


def is_made(folder: Path) -> bool:
    """Whether a model is already there; a folder that appeared at all is whole."""
    return (folder / "config.json").exists()


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it at the end; whoever renames first wins.

    Makers are deterministic, so a loser's folder is as good as the winner's and is thrown away. UserError where
    the folder cannot be written, or something else is in its place.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise UserError(f"cannot make a model in {folder}: {error}; set model.path elsewhere") from error
    try:
        yield aside
        _open_to_all(aside)
        try:
            os.rename(aside, folder)
        except OSError as error:
            if not is_made(folder):
                raise UserError(
                    f"cannot make a model in {folder}: {error}; there is something that is not a model"
                ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _open_to_all(folder: Path) -> None:
    """Readable by other users, as weights are: mkdtemp and safetensors make things private."""
    folder.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
