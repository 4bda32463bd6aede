"""Checks what a conversion has just written: `--verify`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from grpo_mlm.convert.open import DIST_MANIFEST, open_weights
from grpo_mlm.convert.options import Options, Progress
from grpo_mlm.convert.sidecar import HF_MANIFEST
from grpo_mlm.convert.verify import verify
from grpo_mlm.convert.verify_report import raise_unless_equal
from grpo_mlm.errors import ValuesDiffer

CHECKS = ("none", "hash", "full")
_READ_BYTES = 1 << 20


def check_output(how: str, src: Path, dst: Path, options: Options, progress: Progress) -> None:
    """ "hash": the files as they are on the disk have the hashes that the manifest states. "full": every tensor is the
    source's, bit for bit, or rounded where the dtype was changed. ValuesDiffer, or NamesDiffer, where that is not so.
    """
    if how == "hash":
        _check_hashes(dst, progress)
    elif how == "full":
        source = open_weights(src, options.reference, options.allow_missing, options.allow_remote_code)
        written = open_weights(dst, None, options.allow_missing, options.allow_remote_code)
        verdict = verify(source, written, options, progress)
        raise_unless_equal(verdict, allow_rounding=options.dtype != "keep")


def _check_hashes(dst: Path, progress: Progress) -> None:
    manifest = next(path for path in (dst / DIST_MANIFEST, dst / HF_MANIFEST) if path.is_file())
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    progress.start(sum((dst / name).stat().st_size for name in files), 0)
    for name, said in files.items():
        if _sha256(dst / name, progress) != said["sha256"]:
            raise ValuesDiffer(
                f"{dst / name} does not hold what was written to it; check this disk and write it again"
            )


def _sha256(path: Path, progress: Progress) -> str:
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            whole.update(block)
            progress.advance(len(block))
    return whole.hexdigest()
