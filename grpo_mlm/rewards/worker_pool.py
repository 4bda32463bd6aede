"""A bounded pool of grading processes with hard time limits, usable from any thread and any event loop."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo_mlm.errors import RunFailure

START_SECONDS = 120.0  # imports of a symbolic algebra library on a busy machine


class GradingError(Exception):
    """A task that got no verdict; `kind` is `timeout`, `died` or `grading_error`."""

    def __init__(self, kind: str, detail: str, seconds: float = 0.0):
        super().__init__(detail)
        self.kind = kind
        self.seconds = seconds


class Worker:
    """One place in the pool: a process while there is one, replaced after it was killed or died."""

    def __init__(self, handler: str):
        self._handler = handler
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, task: dict[str, Any], timeout_s: float) -> tuple[Any, float]:
        """The handler's value and the seconds it took. The clock starts when the process starts on the task."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"task": task, "seconds": timeout_s}).encode() + b"\n")
            reply = self._read(process, timeout_s)
        except (BrokenPipeError, EOFError):
            self.kill()
            raise GradingError(
                "died", f"the grading process ended with status {process.returncode}"
            ) from None
        except TimeoutError:
            self.kill()
            raise GradingError("timeout", f"no verdict within {timeout_s:g} s", timeout_s) from None
        if "error" in reply:
            raise GradingError("grading_error", reply["error"], reply["seconds"])
        return reply["value"], reply["seconds"]

    def interrupt(self) -> None:
        """End the process from another thread: whoever reads from it sees its end."""
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """End the process, if there is one, and wait for its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process = None

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.kill()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "grpo_mlm.rewards.worker", self._handler],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the run, which then closes the pool
        )
        try:
            self._read(process, START_SECONDS)
        except (EOFError, TimeoutError):
            self.kill()
            raise RunFailure(
                f"the grading process {self._handler} did not start (status {process.returncode}); "
                "its own message is above"
            ) from None
        return process

    def _read(self, process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any]:
        """One line of reply; TimeoutError when it does not come in time, EOFError when the process ends."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                chunk = os.read(process.stdout.fileno(), 65536)
                if not chunk:
                    raise EOFError
                received += chunk
        return json.loads(received)


class WorkerPool:
    """`size` workers of one handler. Tasks wait for a free worker; waiting is not on a task's clock."""

    def __init__(self, handler: str, size: int, timeout_s: float):
        self._timeout_s = timeout_s
        self._workers = [Worker(handler) for _ in range(size)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="grading")
        self._closed = False

    async def ask(self, task: dict[str, Any]) -> tuple[Any, float]:
        """The verdict on one task and the seconds it took; GradingError when there is none."""
        return await asyncio.wrap_future(self._threads.submit(self._run, task))

    def map(self, tasks: Iterable[dict[str, Any]]) -> list[Any]:
        """Verdicts in order, a GradingError in the place of a missing one; blocks."""
        return list(self._threads.map(self._run_or_error, tasks))

    def close(self) -> None:
        """End every process; tasks still running end with GradingError."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.kill()

    def _run(self, task: dict[str, Any]) -> tuple[Any, float]:
        worker = self._free.get()
        try:
            if self._closed:
                raise GradingError("died", "the pool is closed")
            return worker.ask(task, self._timeout_s)
        finally:
            self._free.put(worker)

    def _run_or_error(self, task: dict[str, Any]) -> Any:
        try:
            return self._run(task)[0]
        except GradingError as error:
            return error
