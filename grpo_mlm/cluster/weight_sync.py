"""Drives a weight sync: trainer ranks send and engine ranks receive at the same time, then all agree.

The joint process group numbers the trainer's ranks first, then the engines' ranks in order. A failed sync ends
the step: no engine carries the new version's number, and none generates with half-written weights.
"""

from __future__ import annotations

from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.cluster.process import wait
from grpo_mlm.errors import RunFailure


class WeightSync:
    """Made once the processes are up; `sync(version)` after every change of the actor's weights."""

    def __init__(
        self, actor: ActorGroup, engines: EngineGroup, engine_tp: int, start_timeout_s: float
    ) -> None:
        self.actor, self.engines = actor, engines
        trainers, world = len(actor.processes), len(actor.processes) + engine_tp * len(engines.processes)
        processes = [*actor.processes, *engines.processes]
        first = actor.processes[0]
        host, port = wait([first], [first.submit("open_bridge")], "open_bridge", start_timeout_s)[0]
        refs = [process.submit("join_bridge", host, port, world) for process in actor.processes]
        for i, process in enumerate(engines.processes):
            refs.append(process.submit("join", host, port, trainers + i * engine_tp, world))
        digests = set(wait(processes, refs, "join_bridge", start_timeout_s))
        if len(digests) != 1:
            raise RunFailure(f"trainer and engines planned different transfers: {sorted(digests)}")

    def sync(self, version: int) -> dict[str, float]:
        """Every engine rank gets its slices; returns `sync/*` metrics. Raises on the first failure."""
        processes = [*self.actor.processes, *self.engines.processes]
        refs = [process.submit("send_weights") for process in self.actor.processes]
        refs += [process.submit("receive_weights", version) for process in self.engines.processes]
        replies = wait(processes, refs, "update_weights", self.actor.timeout_s)[len(self.actor.processes) :]
        return {"sync/bytes": float(sum(r["bytes"] for r in replies)), "sync/version": float(version)}
