"""Runs the command line as a user does, and reads what it leaves behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = str(Path(sys.executable).with_name("grpo-mlm"))
CONFIGS = ROOT / "yaml_configs"
TIMEOUT_S = 400  # of a whole run on a busy machine; a run that hangs fails here


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    output: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One record a logged step."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def samples(self, step: int) -> list[dict[str, object]]:
        path = self.folder / "samples" / f"step_{step}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


def grpo_mlm(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`grpo-mlm ARGS`, output and errors together."""
    return subprocess.run(
        [COMMAND, *args],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def train(config: str, folder: Path, *overrides: str, env: dict[str, str] | None = None) -> Ended:
    """Train one of the shipped configs into `folder`."""
    done = grpo_mlm("train", str(CONFIGS / config), f"run.dir={folder}", *overrides, env=env)
    return Ended(done.returncode, done.stdout, folder)


def processes_of(folder: Path) -> list[str]:
    """Command lines of live processes whose standard output is a log of this run."""
    alive = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) in os.readlink(proc / "fd" / "1"):
                alive.append((proc / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return alive
