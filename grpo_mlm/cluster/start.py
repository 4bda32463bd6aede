"""Bring the trainer's ranks and the rollout engines up, and take them down again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.cluster.placement import Slot, join_slots
from grpo_mlm.cluster.process import Process, wait
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World

SHUTDOWN_S = 20.0  # an orderly goodbye may take this long; then the process is killed


@contextmanager
def start_actor(
    config: Config, model: Path, world: World, slots: list[Slot], run_dir: Path
) -> Iterator[ActorGroup]:
    """One Megatron process a slot, joined into one process group, weights loaded."""
    processes = [
        Process(f"actor-{rank}", "grpo_mlm.engine.engine:MegatronEngine", (config, model, world, rank), slots[rank],
                _environment(config), run_dir / "logs")
        for rank in range(world.actor_world)
    ]  # fmt: skip
    try:
        timeout = config.cluster.start_timeout_s
        host, port = wait(
            processes[:1], [processes[0].submit("open_store")], "start of the trainer", timeout
        )[0]
        wait(processes, [p.submit("start", host, port) for p in processes], "start of the trainer", timeout)
        yield ActorGroup(processes, world.dp, config.actor, config.cluster.call_timeout_s)
    finally:
        for process in processes:
            process.kill()


@contextmanager
def start_engines(
    config: Config, model: Path, world: World, slots: list[Slot], run_dir: Path, device: str
) -> Iterator[EngineGroup]:
    """One vLLM engine for every `rollout_tp` slots. They load in the background: `wait_until_ready` before use."""
    first = 0 if config.cluster.placement == "colocated" else world.actor_world
    tp = world.rollout_tp
    shares = [slots[first + i * tp : first + (i + 1) * tp] for i in range(world.num_engines)]
    processes = [
        Process(f"engine-{i}", "grpo_mlm.rollout.engine:RolloutEngine", (config, model, world, i, device == "cpu"),
                join_slots(share), _environment(config), run_dir / "logs")
        for i, share in enumerate(shares)
    ]  # fmt: skip
    try:
        yield EngineGroup(processes, config.cluster.call_timeout_s)
    finally:
        for process in processes:
            process.close("shutdown", SHUTDOWN_S)


def wait_until_ready(engines: EngineGroup, timeout_s: float) -> None:
    """Return once every engine has loaded."""
    refs = [process.submit("ready") for process in engines.processes]
    wait(engines.processes, refs, "start of the engines", timeout_s)


def _environment(config: Config) -> dict[str, str]:
    """What a process's libraries read at import."""
    env = {
        "OMP_NUM_THREADS": str(config.cluster.threads_per_worker),
        # Trainer and engines take turns on the same cores: threads that spin while they wait would steal them.
        "OMP_WAIT_POLICY": "passive",
        # Give large freed blocks back at once: left to itself glibc keeps them, and memory grows for dozens of steps.
        "MALLOC_MMAP_THRESHOLD_": str(4 << 20),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.cluster.nnodes == 1:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
