"""Who is where in the trainer's world."""

from __future__ import annotations

from grpo_mlm.config.world import World
from grpo_mlm.engine.parallel import place_of


def test_ranks_count_tensor_then_data_then_pipeline() -> None:
    world = World(tp=2, pp=2, dp=3, rollout_tp=1, num_engines=1, devices=12)
    places = [place_of(world, rank) for rank in range(12)]
    assert [(p.tp_rank, p.dp_rank, p.pp_rank) for p in places[:8]] == [
        (0, 0, 0),
        (1, 0, 0),
        (0, 1, 0),
        (1, 1, 0),
        (0, 2, 0),
        (1, 2, 0),
        (0, 0, 1),
        (1, 0, 1),
    ]
    # One rank answers for each replica: the first tensor rank of its last stage.
    assert [p.rank for p in places if p.reports] == [6, 8, 10]
