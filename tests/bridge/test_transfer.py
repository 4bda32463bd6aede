"""Weights over a real gloo group and through shared memory: every engine rank gets exactly its slices."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mlm.bridge.sync_plan import check_shapes
from grpo_mlm.errors import PeerGone, RunFailure
from grpo_mlm.layouts.boxes import volume
from grpo_mlm.layouts.megatron import MegatronParallel
from grpo_mlm.layouts.planner import Plan
from tests.bridge.exchange import DENSE, EXPERTS, Exchange, plan_of, random_weights
from tests.bridge.joint import at_once, fill

TRAINERS = [
    (MegatronParallel(*sizes), dp)
    for *sizes, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if sizes[0] * sizes[1] * dp <= 8
]
EXPERT_TRAINERS = [
    (MegatronParallel(ep=2), 2),
    (MegatronParallel(ep=4), 4),
    (MegatronParallel(pp=2, ep=2), 2),
    (MegatronParallel(tp=2, ep=2, etp=1), 1),
    (MegatronParallel(tp=2, ep=2), 2),
]
PAIRS = [
    *((DENSE, *trainer, tp, False) for trainer in TRAINERS for tp in (1, 2, 4)),
    *(
        (EXPERTS, *trainer, tp, ep)
        for trainer in EXPERT_TRAINERS
        for tp, ep in ((1, False), (2, False), (4, True))
    ),
]


def named(pair: object) -> str:
    return pair.family if hasattr(pair, "family") else str(pair)


def sources_of(plan: Plan, canonical: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    made = {id(layout): fill(layout, canonical) for layout in plan.sources}
    return [made[id(layout)] for layout in plan.sources]


def check_received(plan: Plan, received: list[dict[str, Tensor]], canonical: dict[str, Tensor]) -> None:
    for layout, got in zip(plan.destinations, received, strict=True):
        expected = fill(layout, canonical)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
@pytest.mark.parametrize(("spec", "trainer", "dp", "engine_tp", "ep"), PAIRS, ids=named)
def test_every_rank_gets_what_it_holds_bit_for_bit_and_once(
    spec, trainer: MegatronParallel, dp: int, engine_tp: int, ep: bool, colocated: bool
) -> None:
    """WSY-06. One engine, or as many as the trainer has devices for; 400 bytes a bucket split tensors and rounds."""
    trainers = trainer.tp * trainer.pp * dp
    engines = max(1, trainers // engine_tp) if colocated else 2
    if colocated and engine_tp > trainers:
        pytest.skip("more engine ranks than devices")
    plan = plan_of(spec, trainer, dp, engine_tp, engines, colocated, ep)
    canonical = random_weights(spec)
    sent, received = Exchange(plan, colocated).run(sources_of(plan, canonical))
    check_received(plan, [got for got, _ in received], canonical)
    for layout, (_, assembly) in zip(plan.destinations, received, strict=True):
        assert assembly.received == 4 * sum(volume(piece.local_box) for piece in layout.pieces)
    assert sum(sent) == sum(assembly.received for _, assembly in received)
    assert sent == [4 * elements for elements in plan.egress()]


@pytest.mark.parametrize(
    ("spec", "trainer", "dp", "engine_tp", "engines", "colocated"),
    [
        (DENSE, MegatronParallel(tp=2), 2, 2, 2, False),
        (DENSE, MegatronParallel(tp=2), 4, 4, 2, False),
        (DENSE, MegatronParallel(tp=4), 2, 2, 4, True),
        (DENSE, MegatronParallel(), 4, 2, 2, True),
        (EXPERTS, MegatronParallel(ep=2), 4, 2, 2, False),
    ],
)
def test_sources_send_equally_much(
    spec, trainer: MegatronParallel, dp: int, engine_tp: int, engines: int, colocated: bool
) -> None:
    """Wide layers, as real ones are: the largest egress is at most 1.05 times the mean."""
    wide = replace(spec, hidden_size=64, ffn=96, vocab_size=1024)
    plan = plan_of(wide, trainer, dp, engine_tp, engines, colocated)
    sent, _ = Exchange(plan, colocated, bucket_bytes=1 << 16).run(sources_of(plan, random_weights(wide)))
    assert max(sent) <= 1.05 * sum(sent) / len(sent)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that the thread makes; memory that views see is there already."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {
            x.untyped_storage().data_ptr() for x in (*args, *(kwargs or {}).values()) if isinstance(x, Tensor)
        }
        for made in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(made, Tensor) and made.untyped_storage().data_ptr() not in known:
                self.nbytes = max(self.nbytes, made.untyped_storage().nbytes())
        return out


def measured(work):
    def measure() -> int:
        with Largest() as largest:
            work()
        return largest.nbytes

    return measure


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
@pytest.mark.parametrize("bucket_bytes", [2048, 1 << 16])
def test_no_rank_makes_a_tensor_larger_than_a_bucket_or_its_own(colocated: bool, bucket_bytes: int) -> None:
    """In particular never the whole of a tensor that is cut: those are twice as large as any rank's part, and more."""
    spec = replace(DENSE, hidden_size=64, ffn=96, vocab_size=1024)
    plan = plan_of(spec, MegatronParallel(tp=4), 1, 2, 1, colocated)
    exchange = Exchange(plan, colocated, bucket_bytes)
    params = sources_of(plan, random_weights(spec))
    calls = [measured(exchange.sender(rank, held)) for rank, held in enumerate(params)]
    calls += [measured(exchange.receiver(rank)) for rank in range(2)]
    made = at_once(calls)
    own = [
        4 * max(map(torch.Size.numel, map(torch.Size, layout.shapes.values())))
        for layout in plan.destinations
    ]
    assert all(
        0 < nbytes <= max(bucket_bytes, largest) for nbytes, largest in zip(made[4:], own, strict=True)
    )
    assert all(nbytes <= bucket_bytes for nbytes in made[:4])
    assert max(own) <= 4 * 1024 * 64 // 2


def test_weights_arrive_in_the_precision_of_each_tensor() -> None:
    """bf16, and beside them tensors that the engine keeps in fp32."""
    canonical = random_weights(DENSE)
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 2, 1)
    dtypes = [
        {name: torch.float32 if "layernorm" in name else torch.bfloat16 for name in layout.shapes}
        for layout in plan.destinations
    ]
    _, received = Exchange(plan, bucket_bytes=1000, dtypes=dtypes).run(sources_of(plan, canonical))
    for layout, wanted, (got, assembly) in zip(plan.destinations, dtypes, received, strict=True):
        for name, tensor in fill(layout, canonical).items():
            assert got[name].dtype == wanted[name]
            torch.testing.assert_close(got[name], tensor.to(wanted[name]), rtol=0, atol=0)
        held = sum(volume(piece.local_box) * wanted[piece.local].itemsize for piece in layout.pieces)
        assert assembly.received == held


def test_no_bucket_is_larger_than_its_limit() -> None:
    order = Exchange(plan_of(DENSE, MegatronParallel(2, 2), 1, 2, 1), bucket_bytes=400).order
    assert 200 < max(bucket.payload for bucket in order) <= 400


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
def test_one_transfer_after_another(colocated: bool) -> None:
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 1, 1, colocated)
    exchange = Exchange(plan, colocated, mode="sample")
    for version in (1, 2):
        canonical = random_weights(DENSE, version)
        _, [(received, _)] = exchange.run(sources_of(plan, canonical), version)
        check_received(plan, [received], canonical)


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
def test_a_rank_that_holds_only_padding_of_a_tensor_gets_it_as_zeros(colocated: bool) -> None:
    """65 tokens padded to 128 over four ranks: the last two hold nothing but padding."""
    spec = replace(DENSE, vocab_size=65, heads=4, kv_heads=4)
    plan = plan_of(spec, MegatronParallel(tp=4), 1, 4, 1, colocated)
    _, received = Exchange(plan, colocated).run(sources_of(plan, random_weights(spec)))
    got, _ = received[3]
    assert got.keys() == plan.destinations[3].shapes.keys()
    assert torch.equal(got["lm_head.weight"], torch.zeros(32, 8))


def cut_off(outcome: object) -> bool:
    """Whether a rank failed by what its peer did, and not by waiting for it."""
    return isinstance(outcome, PeerGone) and "Timed out" not in str(outcome)


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
def test_a_sender_that_breaks_off_fails_all_others_at_once(colocated: bool) -> None:
    """Not by the time-out: the failed rank cuts its connections, and all must join anew."""
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 1, 1, colocated)
    exchange = Exchange(plan, colocated)
    whole, broken = sources_of(plan, random_weights(DENSE))
    broken = {
        name: tensor for name, tensor in broken.items() if name != "decoder.layers.2.mlp.linear_fc2.weight"
    }
    other, cause, receiver = at_once(
        [exchange.sender(0, whole), exchange.sender(1, broken), exchange.receiver(0)]
    )
    assert isinstance(cause, KeyError)
    assert cut_off(receiver)
    assert cut_off(other) or not colocated  # it may have sent all that it owed
    with pytest.raises(PeerGone):
        exchange.receiver(0)()


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
def test_a_receiver_that_breaks_off_fails_all_others_at_once(colocated: bool) -> None:
    """Through the senders the failure reaches the other receiver too."""
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 2, 1, colocated)
    exchange = Exchange(plan, colocated)
    params = sources_of(plan, random_weights(DENSE))

    def take_one() -> None:
        tensors = exchange.assembly(0).tensors(exchange.arrivals(0))
        next(tensors)
        tensors.close()

    def again_and_again(work):
        """More than the sockets hold, so that it cannot end before the receiver has failed."""

        def repeat() -> None:
            for _ in range(10_000):
                work()

        return repeat

    calls = [
        take_one,
        *(again_and_again(exchange.sender(rank, held)) for rank, held in enumerate(params)),
        again_and_again(exchange.receiver(1)),
    ]
    _, *others = at_once(calls)
    assert all(map(cut_off, others))


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
