"""Whether a conversion may write where it is told to, asked before anything is touched."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_mlm.errors import UserError

_LONGEST_NAME = 255 - len(".partial.journal")


def partial_of(dst: Path) -> Path:
    """Where the output grows; it is renamed to `dst` when it is whole."""
    return dst.with_name(dst.name + ".partial")


def check_output_folder(dst: Path, inputs: list[Path]) -> Path:
    """`dst`, with a name; UserError where it is taken, cannot be renamed to, or would touch an input."""
    dst = dst if dst.name not in ("", "..") else dst.resolve()
    if dst.is_symlink():
        raise UserError(f"{dst} is a link; name the folder itself, which must not exist or be empty")
    if os.path.ismount(dst):
        raise UserError(
            f"{dst} is a mount point, to which nothing can be renamed; name a folder inside of it"
        )
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(f"{dst} is already there and not empty; remove it or choose another output folder")
    if len(os.fsencode(dst.name)) > _LONGEST_NAME:
        raise UserError(
            f"{dst.name[:40]}... is too long a name: beside it grows NAME.partial.journal; choose a shorter one"
        )
    outputs = [_real(dst), _real(partial_of(dst))]
    for source in (_real(path) for path in inputs if os.path.exists(path)):
        for output in outputs:
            if source == output or source in output.parents:
                raise UserError(
                    f"{dst} lies inside of the source {source}; choose an output folder elsewhere"
                )
            if output in source.parents:
                raise UserError(
                    f"{source} lies inside of {output}, which this conversion writes; choose an output folder elsewhere"
                )
    return dst


def _real(path: Path) -> Path:
    """Without links; one that leads in a circle stays, and fails where it is used."""
    return Path(os.path.realpath(path))
