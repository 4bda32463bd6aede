"""A RolloutEngine in a process of its own: vLLM allows one live engine a process, and reads its environment once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.rollout.request import Completion, Request, Sampling

ANSWER_S = 240.0  # longest wait for an answer; reached only by a test that fails


class EngineHost:
    """Runs functions of (engine, *arguments) in the engine's process, one after another."""

    def __init__(self, config: Config, folder: Path, world: World | None = None, index: int = 0) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        tp = config.rollout.tensor_model_parallel_size
        world = world or World(tp=1, pp=1, dp=1, rollout_tp=tp, num_engines=1, devices=1)
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs, config, folder, world, index))
        self.process.start()
        theirs.close()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call; `answer` gets its result."""
        self._pipe.send((function, args))

    def answer(self) -> Any:
        """The result of the oldest call that has not been answered, or its exception."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError("the engine's process does not answer")
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        self.start(function, *args)
        return self.answer()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """All completions, in the order of the requests."""
        return self.call(_generate, list(requests), sampling)

    def stop(self) -> None:
        """An orderly goodbye, and its end if it takes too long."""
        if self.process.is_alive():
            self._pipe.send(None)
            self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def _serve(pipe: Connection, config: Config, folder: Path, world: World, index: int) -> None:
    from grpo_mlm.rollout.engine import RolloutEngine

    engine: RolloutEngine | None = None
    while (entry := _next(pipe)) is not None:
        function, args = entry
        try:
            engine = engine or RolloutEngine(config, folder, world, index, on_cpu=True)
            pipe.send(function(engine, *args))
        except Exception as error:
            pipe.send(error)
    if engine is not None:
        engine.shutdown()


def _next(pipe: Connection) -> Any:
    """The next call; None when there will be none, because the test has ended or its process has died."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _generate(engine: Any, requests: list[Request], sampling: Sampling) -> list[Completion]:
    done = {(c.group_id, c.sample_index): c for c in engine.generate(requests, sampling)}
    return [done[r.group_id, r.sample_index] for r in requests]


def ready(engine: Any) -> None:
    engine.ready()


def version(engine: Any) -> int:
    return engine.weight_version
