"""Says of a conversion's output where it came from: sources, options, versions, hashes, and what was unusual."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_mlm.bridge.durable import side_files, sync
from grpo_mlm.convert.journal import FileRecord
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import Options
from grpo_mlm.convert.target import Format


@dataclass(frozen=True)
class Job:
    """All that the output's bytes depend on."""

    source: Weights
    output: Format
    options: Options
    block_bytes: int
    plan_digest: str

    @cached_property
    def description(self) -> dict[str, Any]:
        """The job as JSON values. Source files are told by size and time, for to hash them is to read them twice."""
        options = self.options
        return {
            "source": str(self.source.store.folder.absolute()),
            "source_kind": self.source.kind,
            "source_files": self._source_files(),
            "output": self.output,
            "options": {
                "dtype": options.dtype,
                "max_shard_size": options.max_shard_size,
                "allow_missing": list(options.allow_missing),
                "block_bytes": self.block_bytes,
            },
            "plan": self.plan_digest,
            "versions": {name: _version(name) for name in ("torch", "megatron-core", "grpo_mlm")},
            "skipped": list(self.source.skipped),
            "hf_names": list(self.source.hf_names),
        }

    @property
    def fingerprint(self) -> str:
        """Equal for two jobs that write the same bytes."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    def is_unchanged(self) -> bool:
        """Whether the source's files are those that the description tells of."""
        return bool(self.description["source_files"] == self._source_files())

    def _source_files(self) -> list[dict[str, Any]]:
        return [_stat(path) for path in (*self.source.store.files(), *side_files(self.source.sidecar))]


def not_finite_values(records: Iterable[FileRecord]) -> dict[str, int]:
    """NaN and infinite values of all files, by tensor."""
    total = Counter[str]()
    for record in records:
        total.update(record.not_finite)
    return dict(sorted(total.items()))


def write_manifest(path: Path, job: Job, records: Iterable[FileRecord], changes: list[str]) -> None:
    """The job and what came of it, onto the disk. `changes`: lines on what was changed beside the weights."""
    records = sorted(records, key=lambda record: record.file)
    content = {
        **job.description,
        "changes": changes,
        "not_finite": not_finite_values(records),
        "files": {record.file: {"bytes": record.bytes, "sha256": record.sha256} for record in records},
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(path)


def _stat(path: Path) -> dict[str, Any]:
    try:
        stat = path.stat()
    except FileNotFoundError:  # since it was opened
        return {"name": path.name, "bytes": None, "mtime_ns": None}
    return {"name": path.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
