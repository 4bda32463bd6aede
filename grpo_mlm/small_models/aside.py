"""Folders that appear whole or not at all, however many processes make them at once."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, renamed to it at the end; whoever renames first wins.

    Makers are deterministic, so a loser's folder is as good as the winner's and is thrown away.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp makes it private
        try:
            os.rename(aside, folder)
        except OSError:
            if not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
