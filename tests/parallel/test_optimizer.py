"""The optimizer step: who takes it, with which rate and decay, and in which precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mlm.telemetry.reduce import reduce_metrics
from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import hf_logprobs, make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow

LENGTHS = [(3, 5), (4, 12), (2, 4), (6, 8)]
ONE, TWO, PIPE = [[[0, 1], [2, 3]]], [[[0], [1]], [[2], [3]]], [[[0], [1], [2], [3]]]


def uniform(batch: Any) -> np.ndarray:
    size = len(batch.rollout_logprobs)
    return np.full(size, 1 / size, dtype=np.float32)


@pytest.mark.parametrize(
    ("world", "schedule"),
    [(make_world(dp=2), TWO), (make_world(tp=2, pp=2), PIPE)],
    ids=["dp2", "tp2 x pp2"],
)
def test_non_finite_loss_on_one_rank_stops_the_step_on_all(
    world: Any, schedule: Any, ranks: Ranks, model: Callable[..., Any]
) -> None:
    """Weights, moments and schedule stay; the step after it is the one that would have come."""
    folder, _ = model("qwen3")
    good, bad = make_batch(LENGTHS), make_batch(LENGTHS)
    bad.advantages[0] = np.inf  # in sample 0, which one replica alone sees
    optim = {"optim": {"lr_warmup_steps": 4}}
    with ranks.engines(make_config(folder, optim), folder, world) as run:
        run(jobs.update, good, [schedule], uniform(good))
        before = run(jobs.weights)
        replies = run(jobs.update, bad, [schedule], uniform(bad))
        assert run(jobs.optimizer_steps) == [1] * world.actor_world
        after = run(jobs.weights)
        metrics = reduce_metrics([reply["metrics"] for [reply] in replies])
        last = run(jobs.update, good, [schedule], uniform(good))
        resumed = whole(folder, world, run(jobs.weights))
    assert metrics["actor/skipped_steps"] == 1
    assert not np.isfinite(metrics["actor/grad_norm"])
    for one, other in zip(before, after, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert reduce_metrics([reply["metrics"] for [reply] in last])["actor/skipped_steps"] == 0
    with ranks.engines(make_config(folder, optim), folder, world) as run:
        run(jobs.update, good, [schedule] * 2, uniform(good))
        never_bad = whole(folder, world, run(jobs.weights))
    assert all(np.array_equal(resumed[name], never_bad[name]) for name in never_bad)


def test_step_without_any_weight_moves_nothing(ranks: Ranks, model: Callable[..., Any]) -> None:
    """NUM-02: counted, and neither weight decay nor momentum moves a weight."""
    folder, _ = model("qwen3")
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        run(jobs.update, batch, [ONE], uniform(batch))
        [before] = run(jobs.weights)
        [[reply]] = run(jobs.update, batch, [ONE], np.zeros(len(batch.advantages), dtype=np.float32))
        [after] = run(jobs.weights)
    assert reduce_metrics([reply["metrics"]]) == {"actor/empty_steps": 1}
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_three_steps_equal_torch_adamw_on_transformers(ranks: Ranks, model: Callable[..., Any]) -> None:
    """Warm-up 1/2, 1, 1 of the rate; clipping by the norm of all gradients; no decay of norms and biases."""
    folder, _ = model("qwen2")
    batch = make_batch(LENGTHS)
    optim = {"lr": 1e-3, "lr_warmup_steps": 2, "eps": 1e-4, "weight_decay": 0.5, "clip_grad": 0.5}
    with ranks.engines(make_config(folder, {"optim": optim}), folder, make_world()) as run:
        [replies] = run(jobs.update, batch, [ONE] * 3, uniform(batch))
        final = whole(folder, make_world(), run(jobs.weights))
    metrics = [reduce_metrics([reply["metrics"]]) for reply in replies]
    assert [step["actor/lr"] for step in metrics] == pytest.approx([5e-4, 1e-3, 1e-3])

    hf = type(model("qwen2")[1]).from_pretrained(folder)
    decayed = [p for p in hf.parameters() if p.dim() > 1]
    exempt = [p for p in hf.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.5}, {"params": exempt, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    for step, lr in zip(metrics, (5e-4, 1e-3, 1e-3), strict=True):
        adam.zero_grad()
        logprobs, _ = hf_logprobs(hf, batch)
        # Ratio 1 at every step: nothing is stored, each training forward is its own old policy.
        (-(logprobs * torch.from_numpy(batch.advantages)).mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        assert step["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        for group in adam.param_groups:
            group["lr"] = lr
        adam.step()
    for name, parameter in hf.named_parameters():
        values = parameter.detach().numpy()
        np.testing.assert_allclose(final[name], values, atol=2e-5 * abs(values).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize("world", [make_world(), make_world(dp=2)], ids=["1", "dp2"])
def test_bfloat16_steps_add_up_in_float32(world: Any, ranks: Ranks, model: Callable[..., Any]) -> None:
    """A norm weight near 1 moves in steps of 1/128 at best; updates of 1/1000 must not be lost one by one."""
    folder, hf = model("qwen3")
    batch = make_batch(LENGTHS)
    actor = {"dtype": "bfloat16", "optim": {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-8}}
    schedule = ONE if world.dp == 1 else TWO
    with ranks.engines(make_config(folder, actor), folder, world) as run:
        run(jobs.update, batch, [schedule] * 12, uniform(batch))
        final = whole(folder, world, run(jobs.weights))
    moved = 0
    for name, parameter in hf.named_parameters():
        start = parameter.detach().bfloat16().float().numpy()
        if "norm" in name:
            moved += int((abs(final[name] - start) >= 1 / 128).sum())
            # No weight moves by more than a step's rate, twelve times, and half a unit of rounding.
            assert abs(final[name] - start).max() < 12 * 1.5e-3 + 1 / 128
    assert moved > 50


def test_bfloat16_gradients_are_summed_in_float32(ranks: Ranks, model: Callable[..., Any]) -> None:
    """Seven equal micro-batches give exactly seven times the gradient of one; in bfloat16 the sum would be rounded."""
    folder, _ = model("qwen3")
    batch = make_batch([(4, 9)])
    with ranks.engines(make_config(folder, {"dtype": "bfloat16"}), folder, make_world()) as run:
        [(once, _)] = run(jobs.gradients, batch, [[[0]]], uniform(batch))
        [(seven, _)] = run(jobs.gradients, batch, [[[0]] * 7], uniform(batch))
    for name, values in once.items():
        if name == "output_layer.weight":  # never rounded to bf16, so sums of it round in fp32
            np.testing.assert_allclose(seven[name], 7 * values, rtol=1e-6)
        else:
            assert np.array_equal(seven[name], 7 * values), name
        assert values.any(), name
