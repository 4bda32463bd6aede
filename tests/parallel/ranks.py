"""Processes that stay up between tests and run engines together: importing megatron-core takes seconds."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World

DEADLINE_S = 120


class Ranks:
    """Up to four rank processes. `engines` builds one engine on each of the first few of them."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []

    @contextmanager
    def engines(self, config: Config, folder: Path, world: World) -> Iterator[Callable[..., list[Any]]]:
        """Inside the block, call the value with a job and its arguments: it runs on every rank as
        `job(engine, *args)`, and the results come back in the order of the ranks."""
        size = world.actor_world
        self._grow(size)
        opened = self._call(size, _build, config, folder, world)
        self._call(size, _start, *opened[0])
        yield lambda job, *args: self._call(size, job, *args)
        self._call(size, _close)

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _grow(self, size: int) -> None:
        context = mp.get_context("spawn")
        while len(self.processes) < size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, len(self.processes)), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def _call(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        for pipe in self.pipes[:size]:
            pipe.send((job, args))
        results: dict[int, Any] = {}
        while len(results) < size:
            pending = [pipe for i, pipe in enumerate(self.pipes[:size]) if i not in results]
            ready = wait(pending, timeout=DEADLINE_S)
            failure = None if ready else f"no answer from {len(pending)} ranks within {DEADLINE_S} s"
            for pipe in ready:
                try:
                    error, result = pipe.recv()
                except EOFError:
                    error, result = "the process died", None
                results[self.pipes.index(pipe)] = result
                failure = failure or error
            if failure:
                self.stop()  # the other ranks may wait for the failed one; the next test starts new ones
                raise AssertionError(f"{job.__name__} failed:\n{failure}")
        return [results[rank] for rank in range(size)]


_engine: Any = None  # of this process


def _serve(pipe: Connection, rank: int) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((None, job(rank, *args) if job in (_build, _start, _close) else job(_engine, *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))


def _build(rank: int, config: Config, folder: Path, world: World) -> tuple[str, int] | None:
    global _engine
    from grpo_mlm.engine.engine import MegatronEngine

    _engine = MegatronEngine(config, folder, world, rank)
    return _engine.open_store() if rank == 0 else None


def _start(rank: int, host: str, port: int) -> None:
    _engine.start(host, port)


def _close(rank: int) -> None:
    global _engine
    _engine.close()
    _engine = None
