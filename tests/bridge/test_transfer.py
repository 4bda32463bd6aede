"""Weights over a real gloo group: every engine rank gets exactly its slices, and a failure reaches everyone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_mlm.bridge.group import JointGroup
from grpo_mlm.bridge.sync_plan import check_shapes
from grpo_mlm.bridge.transfer import Bucket, receive, schedule, send
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout, volume
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, Rope, canonical_tensors
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.vllm import vllm_layout
from tests.bridge.joint import at_once, fill, meet

SPEC = ModelSpec("qwen2", 8, 2, 4, 2, 4, 12, 70, False, True, False, False, 1e-6, Rope(10000.0), 64)
CPU = torch.device("cpu")


def weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make) for name, shape in canonical_tensors(spec).items()}


def plan_of(spec: ModelSpec, trainer: tuple[int, int, int], engine_tp: int, engines: int) -> Plan:
    tp, pp, dp = trainer
    destinations = [vllm_layout(spec, engine_tp, rank) for rank in range(engine_tp)] * engines
    return make_plan(megatron_layouts(spec, MegatronParallel(tp, pp), dp), destinations)


def collect(
    order: list[Bucket], rank: int, layout: Layout, dtype: torch.dtype, group: JointGroup
) -> dict[str, Tensor]:
    received = list(receive(order, rank, layout, dtype, CPU, group))
    assert len({name for name, _ in received}) == len(received), "a tensor came twice"
    return dict(received)


def transfer(
    plan: Plan, groups: list[JointGroup], canonical: dict[str, Tensor], dtype: torch.dtype, bucket_bytes: int
) -> tuple[list[int], list[dict[str, Tensor]]]:
    """Run all ranks of a plan; bytes sent by each source, tensors received by each destination."""
    order, first = schedule(plan, dtype.itemsize, bucket_bytes), len(plan.sources)
    sources = [fill(layout, canonical) for layout in plan.sources]
    calls = [
        lambda r=r, p=params: send(order, r, p, dtype, groups[r], first) for r, params in enumerate(sources)
    ]
    calls += [
        lambda r=r, lay=layout: collect(order, r, lay, dtype, groups[first + r])
        for r, layout in enumerate(plan.destinations)
    ]
    outcomes = at_once(calls)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes[:first], outcomes[first:]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("trainer", "engine_tp", "engines"),
    [((1, 1, 1), 1, 1), ((2, 2, 1), 2, 1), ((2, 2, 1), 1, 2), ((1, 2, 2), 2, 2), ((4, 1, 1), 4, 1)],
)
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 400])
def test_every_destination_gets_its_slices_bit_for_bit(
    trainer: tuple[int, int, int], engine_tp: int, engines: int, tied: bool, bucket_bytes: int
) -> None:
    """WSY-06: small buckets split tensors and rounds; (4, 1, 1) cuts through a query group on the trainer."""
    spec = replace(SPEC, tied=tied)
    plan = plan_of(spec, trainer, engine_tp, engines)
    canonical = weights(spec)
    groups = meet(len(plan.sources) + len(plan.destinations))
    _, received = transfer(plan, groups, canonical, torch.float32, bucket_bytes)
    for layout, got in zip(plan.destinations, received, strict=True):
        expected = fill(layout, canonical)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)


def test_each_byte_travels_once_and_replicas_share_the_work() -> None:
    """No rank sends or gets another's part: the bytes sent are those that the destinations hold, less padding."""
    plan = plan_of(SPEC, (2, 1, 2), 2, 2)
    sent, _ = transfer(plan, meet(8), weights(SPEC), torch.float32, 400)
    held = sum(volume(piece.local_box) for layout in plan.destinations for piece in layout.pieces)
    assert sum(sent) == 4 * held
    for one, other in ((0, 2), (1, 3)):  # the same weights in two data-parallel ranks
        assert sent[one] == pytest.approx(sent[other], rel=0.3)


def test_weights_arrive_in_the_engines_precision() -> None:
    canonical = weights(SPEC)
    plan = plan_of(SPEC, (1, 1, 1), 1, 1)
    _, [received] = transfer(plan, meet(2), canonical, torch.bfloat16, 1 << 20)
    expected = fill(plan.destinations[0], canonical)
    for name, tensor in received.items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, expected[name].bfloat16(), rtol=0, atol=0)


def test_no_bucket_is_larger_than_its_limit() -> None:
    order = schedule(plan_of(SPEC, (2, 2, 1), 2, 1), 4, 400)
    assert 50 < max(bucket.elements for bucket in order) <= 100


def test_a_group_serves_one_transfer_after_another() -> None:
    plan = plan_of(SPEC, (2, 1, 1), 1, 1)
    groups = meet(3)
    for seed in (1, 2):
        canonical = weights(SPEC, seed)
        _, [received] = transfer(plan, groups, canonical, torch.float32, 400)
        expected = fill(plan.destinations[0], canonical)
        assert all(torch.equal(received[name], expected[name]) for name in expected)


def test_a_rank_that_holds_only_padding_of_a_tensor_gets_it_as_zeros() -> None:
    """65 tokens padded to 128 over four ranks: the last two hold nothing but padding."""
    spec = replace(SPEC, vocab_size=65, heads=4, kv_heads=4)
    plan = plan_of(spec, (1, 1, 1), 4, 1)
    _, received = transfer(plan, meet(5), weights(spec), torch.float32, 1 << 20)
    assert received[3].keys() == plan.destinations[3].shapes.keys()
    assert torch.equal(received[3]["lm_head.weight"], torch.zeros(32, 8))


def cut_off(outcome: object) -> bool:
    """Whether a rank failed by what its peer did, and not by waiting for it."""
    return isinstance(outcome, RuntimeError) and "Timed out" not in str(outcome)


def test_a_sender_that_breaks_off_fails_its_receivers_at_once() -> None:
    """Not by the time-out: the failed rank cuts its connections, and the group must be joined anew."""
    plan = plan_of(SPEC, (2, 1, 1), 1, 1)
    groups = meet(3)
    order = schedule(plan, 4, 400)
    params = fill(plan.sources[0], weights(SPEC))
    del params["output_layer.weight"]
    layout = plan.destinations[0]
    calls = [
        lambda: send(order, 0, params, torch.float32, groups[0], 2),
        lambda: send(order, 1, fill(plan.sources[1], weights(SPEC)), torch.float32, groups[1], 2),
        lambda: collect(order, 0, layout, torch.float32, groups[2]),
    ]
    broken, _, receiver = at_once(calls)
    assert isinstance(broken, KeyError)
    assert cut_off(receiver)
    with pytest.raises(RunFailure, match="join again"):
        collect(order, 0, layout, torch.float32, groups[2])


def test_a_receiver_that_breaks_off_fails_its_senders_at_once() -> None:
    """One receiver fails, and through the senders the failure reaches the other receiver too."""
    plan = plan_of(SPEC, (1, 1, 1), 1, 2)
    groups = meet(3)
    order, layout = schedule(plan, 4, 400), plan.destinations[0]

    def take_one() -> None:
        arriving = receive(order, 0, layout, torch.float32, CPU, groups[1])
        next(arriving)
        arriving.close()

    def send_all() -> None:
        """More than the sockets hold, so that it cannot end before the receiver has failed."""
        params = fill(plan.sources[0], weights(SPEC))
        for _ in range(10_000):
            send(order, 0, params, torch.float32, groups[0], 1)

    def take_all() -> None:
        for _ in range(10_000):
            collect(order, 1, layout, torch.float32, groups[2])

    _, sender, other = at_once([take_one, send_all, take_all])
    assert cut_off(sender)
    assert cut_off(other)


def test_names_and_shapes_that_differ_are_all_listed() -> None:
    """WSY-09: one extra, one missing, one renamed, one of another shape."""
    planned = {"extra": (1,), "old_name": (2, 2), "same": (3,), "shape": (4, 4)}
    expected = {"missing": (1,), "new_name": (2, 2), "same": (3,), "shape": (4, 5)}
    with pytest.raises(RunFailure) as error:
        check_shapes(planned, expected)
    text = str(error.value)
    for name in ("extra", "old_name"):
        assert f"{name}: in the plan, not in the engine" in text
    for name in ("missing", "new_name"):
        assert f"{name}: in the engine, not in the plan" in text
    assert "shape: (4, 4) planned, (4, 5) in the engine" in text
    assert "same" not in text
