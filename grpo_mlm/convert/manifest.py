"""Says of a conversion's output where it came from: sources, options, versions, hashes, and what was unusual."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from grpo_mlm.bridge.durable import side_files, sync
from grpo_mlm.convert.journal import FileRecord
from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import Options


def describe_job(source: Weights, output: str, options: Options, block_bytes: int, plan_digest: str) -> dict[str, Any]:
    """All that the output's bytes depend on, as JSON values. Source files by size and time: reading them takes long."""
    return {
        "source": {
            "path": str(source.store.folder.absolute()),
            "kind": source.kind,
            "files": [_stat(path) for path in source.store.files()],
            "side_files": [_stat(path) for path in side_files(source.sidecar)],
        },
        "output": output,
        "options": {
            "dtype": options.dtype,
            "max_shard_size": options.max_shard_size,
            "allow_missing": list(options.allow_missing),
            "block_bytes": block_bytes,
        },
        "plan": plan_digest,
        "versions": {name: _version(name) for name in ("torch", "megatron-core", "grpo_mlm")},
        "skipped": list(source.skipped),
        "hf_names": list(source.hf_names),
    }


def fingerprint(job: dict[str, Any]) -> str:
    """Equal for two jobs that write the same bytes."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def write_manifest(path: Path, job: dict[str, Any], records: Iterable[FileRecord], changes: list[str]) -> None:
    """The job and what came of it, onto the disk. `changes`: lines that say what was changed beside the weights."""
    records = sorted(records, key=lambda record: record.file)
    not_finite = Counter[str]()
    for record in records:
        not_finite.update(record.not_finite)
    content = {
        **job,
        "fingerprint": fingerprint(job),
        "changes": changes,
        "not_finite": dict(sorted(not_finite.items())),
        "files": {record.file: {"bytes": record.bytes, "sha256": record.sha256} for record in records},
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    sync(path)


def _stat(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"name": path.name, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
