"""The rollout engines as one object: spreads requests over them and yields samples as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from grpo_mlm.cluster.process import Process, ProcessGroup
from grpo_mlm.rollout.request import Completion, Request, Sampling


class EngineGroup(ProcessGroup):
    """One process an engine. A group's samples go to one engine, so that its prompt is computed once."""

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Completion]:
        """Completions of all engines in the order in which they finish."""
        shares: list[list[Request]] = [[] for _ in self.processes]
        place: dict[int, int] = {}
        for request in requests:
            shares[place.setdefault(request.group_id, len(place) % len(shares))].append(request)
        finished: asyncio.Queue[Completion | BaseException | None] = asyncio.Queue()

        async def drain(process: Process, share: list[Request]) -> None:
            try:
                async for completion in process.stream("generate", share, sampling):
                    finished.put_nowait(completion)
                finished.put_nowait(None)
            except BaseException as error:  # handed to the consumer, which raises it
                finished.put_nowait(error)

        tasks = [asyncio.create_task(drain(p, s)) for p, s in zip(self.processes, shares, strict=True) if s]
        try:
            running = len(tasks)
            while running:
                item = await finished.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
