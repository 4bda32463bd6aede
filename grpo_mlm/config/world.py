"""How many processes there are of each kind, and how many devices they ask for together."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_mlm.config.schema import Config
from grpo_mlm.errors import UserError


@dataclass(frozen=True)
class World:
    """Sizes of the trainer's and the engines' groups; `devices` is what the run asks of the cluster."""

    tp: int
    pp: int
    dp: int
    rollout_tp: int
    num_engines: int  # 0 while steps replay a saved batch
    devices: int

    @property
    def actor_world(self) -> int:
        """Trainer ranks."""
        return self.tp * self.pp * self.dp

    @property
    def rollout_world(self) -> int:
        """Engine ranks, of all engines together."""
        return self.rollout_tp * self.num_engines

    def describe(self) -> str:
        """One line for people."""
        actor = f"actor TP{self.tp} x PP{self.pp} x DP{self.dp} ({_count(self.actor_world, 'rank')})"
        rollout = f"rollout {self.num_engines} x TP{self.rollout_tp} ({_count(self.rollout_world, 'rank')})"
        if not self.num_engines:
            rollout = "no rollout engine"
        return f"{actor}, {rollout}, {_count(self.devices, 'device')}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def resolve_world(config: Config, devices_per_node: int | None) -> World:
    """Fill in the sizes that the config leaves to the devices there are.

    `devices_per_node` None: as many as the layout asks for (a CPU). Colocated groups share devices, so the run
    asks for the larger one; disaggregated ones add up. UserError where they do not fit, with both numbers.
    """
    have = None if devices_per_node is None else config.cluster.nnodes * devices_per_node
    par, rollout_tp = config.actor.megatron, config.rollout.tensor_model_parallel_size
    tp, pp = par.tensor_model_parallel_size, par.pipeline_model_parallel_size
    if devices_per_node is not None and rollout_tp > devices_per_node:
        raise UserError(
            f"rollout.tensor_model_parallel_size={rollout_tp}: an engine lies on one node, "
            f"which has {devices_per_node} device{'s' * (devices_per_node > 1)}"
        )
    dp, engines = _replicas(config, tp * pp, rollout_tp, have)
    actor, rollout = tp * pp * dp, rollout_tp * engines
    colocated = config.cluster.placement == "colocated"
    if colocated and rollout > actor:
        raise UserError(
            f"cluster.placement=colocated: {engines} engines x TP{rollout_tp} = {rollout} rollout ranks and {actor} "
            "trainer ranks: every rollout rank shares the device of a trainer rank; lower rollout.num_engines or "
            "rollout.tensor_model_parallel_size, or use disaggregated"
        )
    devices = actor if colocated else actor + rollout
    world = World(tp, pp, dp, rollout_tp, engines, devices)
    if have is not None and devices > have:
        raise UserError(
            f"{world.describe()}, {config.cluster.placement}: {devices} devices asked, {have} there; "
            "lower the parallel sizes, or raise cluster.nnodes or cluster.n_devices_per_node"
        )
    if devices_per_node is not None:
        _check_engines_on_nodes(world, 0 if colocated else actor, devices_per_node)
    problem = idle_replicas(config, dp)
    if problem:
        raise UserError(problem)
    return world


def idle_replicas(config: Config, dp: int) -> str | None:
    """What is wrong where an optimizer step has fewer samples than there are replicas.

    Any number from dp on works: micro-batches are cut by tokens, not by an equal count of samples.
    """
    samples = config.mini_batch_size * config.rollout.n
    if samples >= dp:
        return None
    return (
        f"an optimizer step has {config.mini_batch_size} prompts x rollout.n={config.rollout.n} = {samples} samples, "
        f"fewer than the {dp} data-parallel replicas; lower actor.megatron.data_parallel_size, "
        "or raise actor.ppo_mini_batch_size or data.train_batch_size"
    )


def _replicas(config: Config, model: int, rollout_tp: int, have: int | None) -> tuple[int, int]:
    """Data-parallel size and number of engines; what is null becomes every device left over."""
    dp, engines = config.actor.megatron.data_parallel_size, config.rollout.num_engines
    if config.trainer.debug.load_rollouts is not None:
        engines = 0
    if have is None:
        return dp or 1, 1 if engines is None else engines
    for_actor = for_rollout = have
    if config.cluster.placement == "disaggregated":
        if dp is None and engines is None:
            raise UserError(
                "cluster.placement=disaggregated: set actor.megatron.data_parallel_size or rollout.num_engines; "
                f"with both null there is no telling how the {have} devices are shared out"
            )
        for_actor -= rollout_tp * (engines or 0)
        for_rollout -= model * (dp or 0)
    if dp is None:
        dp = _share(for_actor, model, have, "actor.megatron.data_parallel_size", "tensor x pipeline size")
    if engines is None:
        size = "rollout.tensor_model_parallel_size"
        engines = _share(for_rollout, rollout_tp, have, "rollout.num_engines", size)
    return dp, engines


def _share(left: int, each: int, have: int, key: str, size: str) -> int:
    if left < each or left % each:
        raise UserError(
            f"{size} {each} does not divide the {max(left, 0)} devices left for it (of {have}); "
            f"change it, or set {key}"
        )
    return left // each


def _check_engines_on_nodes(world: World, first: int, per_node: int) -> None:
    for i in range(world.num_engines):
        start = first + i * world.rollout_tp
        if start // per_node != (start + world.rollout_tp - 1) // per_node:
            raise UserError(
                f"rollout.tensor_model_parallel_size={world.rollout_tp}: engine {i} would lie across two nodes of "
                f"{per_node} devices; choose sizes that divide the devices of a node"
            )
