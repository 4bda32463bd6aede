"""Sizes of the groups, and devices asked against devices there: CFG-03, CFG-04."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_mlm.config import Config, resolve_world
from grpo_mlm.errors import UserError

Load = Callable[..., Config]

TP, PP, DP = (
    f"actor.megatron.{name}={{}}".format
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
)
ROLLOUT_TP = "rollout.tensor_model_parallel_size={}".format
ENGINES = "rollout.num_engines={}".format
APART = "cluster.placement=disaggregated"


def sizes(config: Config, per_node: int | None) -> tuple[int, int, int]:
    """(data-parallel size, engines, devices)."""
    world = resolve_world(config, per_node)
    return world.dp, world.num_engines, world.devices


def refusal(config: Config, per_node: int | None) -> str:
    with pytest.raises(UserError) as caught:
        resolve_world(config, per_node)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "per_node", "expected"),
    [
        # CPU: as many devices as the layout asks for
        ([], None, (1, 1, 1)),
        ([TP(2), PP(2), ROLLOUT_TP(2)], None, (1, 1, 4)),
        ([DP(3), ENGINES(2)], None, (3, 2, 3)),
        ([TP(2), DP(2), ENGINES(2), APART], None, (2, 2, 6)),
        # a node of 8: what is null is every device left over
        ([TP(2)], 8, (4, 8, 8)),
        ([TP(2), PP(2), ROLLOUT_TP(4)], 8, (2, 2, 8)),
        ([TP(2), DP(2), ENGINES(1)], 8, (2, 1, 4)),
        ([TP(2), DP(2), ROLLOUT_TP(2), APART], 8, (2, 2, 8)),
        ([TP(2), ENGINES(2), ROLLOUT_TP(2), APART], 8, (2, 2, 8)),
        # two nodes
        ([TP(4), "cluster.nnodes=2", "cluster.address=auto", ROLLOUT_TP(8)], 8, (4, 2, 16)),
        ([DP(8), TP(1), APART, "cluster.nnodes=2", "cluster.address=auto", ROLLOUT_TP(4)], 8, (8, 2, 16)),
    ],
)
def test_sizes_by_hand(
    load: Load, overrides: list[str], per_node: int | None, expected: tuple[int, int, int]
) -> None:
    assert sizes(load(*overrides), per_node) == expected


def test_ranks_of_each_group(load: Load) -> None:
    world = resolve_world(load(TP(2), PP(3), DP(4), ROLLOUT_TP(2), ENGINES(5)), None)
    assert (world.actor_world, world.rollout_world) == (24, 10)
    assert world.describe() == ("actor TP2 x PP3 x DP4 (24 ranks), rollout 5 x TP2 (10 ranks), 24 devices")


def test_a_replay_asks_for_no_engine(load: Load) -> None:
    config = load("trainer.debug.load_rollouts=a.safetensors", APART, TP(2))
    assert sizes(config, 4) == (2, 0, 4)
    assert sizes(config, None) == (1, 0, 2)


@pytest.mark.parametrize(
    ("overrides", "per_node", "named"),
    [
        ([ROLLOUT_TP(2)], 1, ["rollout.tensor_model_parallel_size=2", "1 device"]),
        ([TP(4), PP(4), DP(1), ENGINES(1)], 8, ["16 devices asked", "8 there"]),
        ([TP(4), DP(1), ENGINES(2), ROLLOUT_TP(4), APART], 8, ["12 devices asked", "8 there"]),
        ([TP(4), PP(4)], 8, ["tensor x pipeline size 16", "8 devices"]),
        ([TP(3)], 8, ["tensor x pipeline size 3", "8 devices", "actor.megatron.data_parallel_size"]),
        ([ROLLOUT_TP(3)], 8, ["rollout.tensor_model_parallel_size 3", "8 devices", "rollout.num_engines"]),
        ([DP(8), APART], 8, ["rollout.tensor_model_parallel_size 1", "0 devices left"]),
        ([APART], 8, ["actor.megatron.data_parallel_size or rollout.num_engines", "8 devices"]),
        (
            [ROLLOUT_TP(3), ENGINES(3), "cluster.nnodes=2", "cluster.address=auto"],
            8,
            ["engine 2", "nodes", "rollout.tensor_model_parallel_size=3"],
        ),
        (
            [DP(4), ROLLOUT_TP(8), ENGINES(1), APART, "cluster.nnodes=2", "cluster.address=auto"],
            8,
            ["engine 0", "nodes"],
        ),
        ([DP(2), ENGINES(3)], 8, ["3 engines x TP1 = 3 rollout ranks", "2 trainer ranks", "disaggregated"]),
        (
            ["data.train_batch_size=1", "rollout.n=4"],
            8,
            ["1 prompts x rollout.n=4 = 4 samples", "8 data-parallel replicas"],
        ),
    ],
)
def test_what_does_not_fit_is_an_error_with_both_numbers(
    load: Load, overrides: list[str], per_node: int, named: list[str]
) -> None:
    message = refusal(load(*overrides), per_node)
    assert [text for text in named if text not in message] == []
