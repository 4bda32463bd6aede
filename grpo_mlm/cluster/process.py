"""One of our classes living in a Ray process of its own, and the group of such processes.

The class is named by `module:class` and imported over there, so the driver loads neither torch's distributed
parts nor megatron nor vllm, and the process's environment is set before anything reads it. Everything that a
process prints goes to its own file in the run directory; when it dies, the error shows that file's end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_mlm.cluster.placement import Slot
from grpo_mlm.errors import PeerGone, RunFailure, UserError

LOG_TAIL = 15  # lines of a dead process's log shown in the error


class _Host:
    """The Ray side: builds the target object and forwards calls to it."""

    def __init__(self, log_file: str, target: str, args: tuple[Any, ...]) -> None:
        os.makedirs(os.path.dirname(log_file), exist_ok=True)
        fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, sys.stdout.fileno())
        os.dup2(fd, sys.stderr.fileno())
        module, _, name = target.partition(":")
        self.target = getattr(import_module(module), name)(*args)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.target, method)(*args)

    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        for item in getattr(self.target, method)(*args):  # noqa: UP028 - Ray sends into what it iterates
            yield item


class Process:
    """A handle to one process. `name` appears in errors and names its log file."""

    def __init__(
        self, name: str, target: str, args: tuple[Any, ...], slot: Slot, env: dict[str, str], log_dir: Path
    ):
        self.name = name
        self.log_file = log_dir / f"{name}.log"
        self.handle: Any = (  # an ActorHandle; its methods exist only at run time
            ray.remote(_Host)
            .options(
                num_cpus=0,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    slot.group, placement_group_bundle_index=slot.bundle
                ),
                runtime_env={"env_vars": env | slot.env},
            )
            .remote(str(self.log_file), target, args)
        )

    def submit(self, method: str, *args: Any) -> ray.ObjectRef:
        """Start a call; `wait` gets its result."""
        return self.handle.call.remote(method, *args)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Items of a generator method, as they come."""
        try:
            async for ref in self.handle.stream.options(num_returns="streaming").remote(method, *args):
                yield await ref
        except RayError as error:
            raise explain(error, self, method) from None

    def log_tail(self) -> str:
        """The last lines that the process printed; empty when it has no readable log."""
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        except OSError:
            return ""

    def kill(self) -> None:
        ray.kill(self.handle)

    def close(self, method: str, timeout_s: float) -> None:
        """Let the target end its own children by `method`; a process that does not answer is killed all the same."""
        ref = self.submit(method)
        ray.wait([ref], timeout=timeout_s)
        self.kill()


def wait(
    processes: Sequence[Process], refs: Sequence[ray.ObjectRef], what: str, timeout_s: float
) -> list[Any]:
    """Results in order; the first failure or the time-out ends the wait with one clear error.

    A process that was let down by another one does not end it: the other one's error says why.
    """
    deadline = time.monotonic() + timeout_s
    pending = dict(zip(refs, processes, strict=True))
    let_down: Exception | None = None
    while pending:
        ready, late = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(pending[ref].name for ref in late)
            raise RunFailure(f"{what}: no answer from {names} within {timeout_s:.0f} s")
        process = pending.pop(ready[0])
        try:
            ray.get(ready[0])
        except RayError as error:
            failure = explain(error, process, what)
            if not isinstance(failure, PeerGone):
                raise failure from None
            let_down = let_down or failure
    if let_down:
        raise let_down
    return ray.get(list(refs))


class ProcessGroup:
    """Processes of one kind that answer the same calls."""

    def __init__(self, processes: list[Process], timeout_s: float) -> None:
        self.processes = processes
        self.timeout_s = timeout_s

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call every process with the same arguments; one result a process."""
        refs = [process.submit(method, *args) for process in self.processes]
        return wait(self.processes, refs, method, self.timeout_s)


def explain(error: Exception, process: Process, what: str) -> Exception:
    """The user's mistake as it is; anything else as a RunFailure that names process, call and cause."""
    cause = getattr(error, "cause", None) or error
    if isinstance(cause, UserError | RunFailure):
        return type(cause)(*cause.args)
    # Ray's own errors end with the line that matters; the process's log has the traceback.
    headline = f"{type(cause).__name__}: {cause}".strip().splitlines()[0 if cause is not error else -1]
    tail = process.log_tail()
    return RunFailure(
        f"{what}: {process.name} failed: {headline}"
        + (f"\n--- end of {process.log_file} ---\n{tail}" if tail else "")
    )
