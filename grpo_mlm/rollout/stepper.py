"""The one thread that touches vLLM: it steps the engine while samples decode and runs other threads' calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from grpo_mlm.errors import RunFailure

if TYPE_CHECKING:
    from vllm import LLMEngine, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.outputs import RequestOutput

T = TypeVar("T")
Sink = Callable[["RequestOutput | RunFailure"], None]
"""Gets a request's finished output, or why there will be none."""

JOIN_S = 10.0  # a thread that is stuck inside vLLM is left behind after this


class Stepper:
    """Alive until `close`. When a step fails the engine is broken: all waiters hear of it, and later calls too."""

    def __init__(self, engine: LLMEngine, name: str) -> None:
        self.engine = engine
        self.name = name
        self._sinks: dict[str, Sink] = {}
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a collected iterator may enter again
        self._end: RunFailure | None = None  # why no call is taken any more
        self._thread = threading.Thread(target=self._run, name="vllm-step", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Requests that have not finished."""
        return len(self._sinks)

    def call(self, closure: Callable[[], T]) -> T:
        """Run a closure between two steps; its result, or its exception."""
        return self._submit(closure).result()

    def add(self, request_id: str, prompt: TokensPrompt, params: SamplingParams, sink: Sink) -> None:
        """Admit a request. Only inside a `call`."""
        self.engine.add_request(request_id, prompt, params)
        self._sinks[request_id] = sink

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop requests that nobody waits for any more; those that have finished are ignored.

        Returns at once: a forgotten iterator ends in whichever thread collects it, the step thread included.
        """

        def abort() -> None:
            alive = [name for name in request_ids if self._sinks.pop(name, None) is not None]
            self.engine.abort_request(alive)

        with suppress(RunFailure):  # an engine that is gone runs nothing
            self._submit(abort)

    def close(self) -> None:
        """End the thread; whoever still waits gets a RunFailure."""
        self._refuse(RunFailure(f"{self.name} was shut down"))
        self._thread.join(JOIN_S)

    def _submit(self, closure: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._end is not None:
                raise self._end
            self._calls.put((closure, future))
        return future

    def _run(self) -> None:
        while True:
            try:
                entry = self._calls.get(block=not self._sinks)
            except queue.Empty:
                self._step()
                continue
            if entry is None:
                break
            closure, future = entry
            try:
                future.set_result(closure())
            except BaseException as error:
                future.set_exception(error)
        self._fail_waiters(RunFailure(f"{self.name} was shut down"))

    def _step(self) -> None:
        try:
            for output in self.engine.step():
                if output.finished and output.request_id in self._sinks:
                    self._sinks.pop(output.request_id)(cast("RequestOutput", output))
        except Exception as error:
            died = getattr(self.engine.model_executor, "is_failed", False)  # of an executor with workers
            cause = "one of its worker processes died" if died else f"{type(error).__name__}: {error}"
            reason = RunFailure(f"{self.name} broke down: {cause}")
            reason.__cause__ = error
            self._refuse(reason)
            self._fail_waiters(reason)

    def _fail_waiters(self, error: RunFailure) -> None:
        for sink in self._sinks.values():
            sink(error)
        self._sinks.clear()

    def _refuse(self, reason: RunFailure) -> None:
        """Take no more calls; the thread ends after those that it has."""
        with self._lock:
            if self._end is None:
                self._end = reason
                self._calls.put(None)
