"""Drives a weight sync: trainer ranks send and engine ranks receive at the same time, then all agree.

All or nothing. Before anything moves, every trainer rank looks for NaN and infinity; only when every rank of every
engine has the new weights, and the checksums are right, do the engines carry the new version's number. A sync that
fails ends the step: engines that have lost their old weights sample nothing until one succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_mlm.bridge.sync_plan import SyncShape, same_on_all
from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.cluster.process import wait
from grpo_mlm.config.world import World
from grpo_mlm.errors import RunFailure

SHOWN_TENSORS = 5  # of those with a NaN


class WeightSync:
    """Made once the processes are up; `sync(version)` after every change of the actor's weights."""

    def __init__(
        self,
        actor: ActorGroup,
        engines: EngineGroup,
        model_folder: str,
        world: World,
        colocated: bool,
        te: bool,
        nodes: Sequence[str],
        start_timeout_s: float,
    ) -> None:
        """`te`: the trainer's layers are Transformer Engine's. `nodes`: of every device, if there are several."""
        self.actor, self.engines, self.start_timeout_s = actor, engines, start_timeout_s
        if colocated:
            engines.call("retake_memory", "weights")  # loaders read what the model holds
        recorded = same_on_all(engines.call("record"))
        self.shape = SyncShape(
            model_folder, world.tp, world.pp, world.dp, te, world.num_engines, recorded, colocated, nodes
        )
        self.version = -1
        self._joined = False
        self._join()

    def sync(self, version: int) -> dict[str, float]:
        """Every engine rank gets its slices; returns `sync/*` metrics. RunFailure with the cause."""
        self._refuse_not_finite()
        if not self._joined:
            self._join()
        if self.shape.colocated:
            self.engines.call("retake_memory", "weights")
        self._joined = False  # after a failure the connections are gone
        counts = self._transfer(version)
        self._joined = True
        if self.shape.colocated:
            self.engines.call("retake_memory", "kv_cache")
        self.engines.call("commit_weights", version)
        self.version = version
        totals = {key: float(sum(count[key] for count in counts)) for key in ("bytes", "tensors", "verified")}
        return {f"sync/{key}": value for key, value in totals.items()} | {"sync/version": float(version)}

    def _transfer(self, version: int) -> list[dict[str, int]]:
        processes = [*self.actor.processes, *self.engines.processes]
        refs = [process.submit("send_weights", version) for process in self.actor.processes]
        refs += [process.submit("receive_weights", version) for process in self.engines.processes]
        replies = wait(processes, refs, "update_weights", self.actor.timeout_s)
        return replies[len(self.actor.processes) :]

    def _refuse_not_finite(self) -> None:
        found = sorted({name for names in self.actor.call("not_finite") for name in names})
        if found:
            more = f" and {len(found) - SHOWN_TENSORS} more" if len(found) > SHOWN_TENSORS else ""
            raise RunFailure(
                f"NaN or infinite weights in {', '.join(found[:SHOWN_TENSORS])}{more}: nothing was sent, the engines "
                f"keep version {self.version}; lower actor.optim.lr or look at the last batch"
            )

    def _join(self) -> None:
        """Connect trainer and engines, and compare what they plan."""
        actors, engines, tp = self.actor.processes, self.engines.processes, self.shape.rollout_tp
        timeout_s = self.start_timeout_s
        host, port = wait(actors[:1], [actors[0].submit("open_bridge")], "open_bridge", timeout_s)[0]
        hosts = actors[: self.shape.engine_ranks] if self.shape.colocated else []
        handoffs = wait(
            hosts, [process.submit("open_handoff") for process in hosts], "open_handoff", timeout_s
        )
        refs = [process.submit("join_bridge", host, port, self.shape) for process in actors]
        for i, process in enumerate(engines):
            refs.append(process.submit("join", host, port, handoffs[i * tp : (i + 1) * tp], self.shape))
        digests = set(wait([*actors, *engines], refs, "join_bridge", timeout_s))
        if len(digests) != 1:
            raise RunFailure(f"trainer and engines planned different transfers: {sorted(digests)}")
        self._joined = True
