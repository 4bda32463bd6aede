"""`bridge.verify`: what the checksums find, what they cost in pieces, and the error that names what was damaged."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from grpo_mlm.bridge import checksums
from grpo_mlm.bridge.checksums import SAMPLE, checksum
from grpo_mlm.bridge.finite import not_finite
from grpo_mlm.errors import PeerGone, RunFailure
from grpo_mlm.layouts.megatron import MegatronParallel
from tests.bridge.exchange import DENSE, Exchange, plan_of, random_weights
from tests.bridge.joint import at_once, fill


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_swap_and_every_changed_bit_shows(dtype: torch.dtype) -> None:
    piece = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    flat, sums = piece.view(-1), {int(checksum(piece))}
    for i, j in combinations(range(15), 2):
        swapped = flat.clone()
        swapped[[i, j]] = flat[[j, i]]
        sums.add(int(checksum(swapped.view(3, 5))))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for i in range(15):
        for bit in range(8 * dtype.itemsize - 1):
            flipped = flat.clone()
            flipped.view(bits)[i] ^= 1 << bit
            sums.add(int(checksum(flipped.view(3, 5))))
    assert len(sums) == 1 + 15 * 14 // 2 + 15 * (8 * dtype.itemsize - 1)


def test_a_checksum_depends_on_the_elements_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on strides, nor on where large tensors are cut for summing."""
    matrix = torch.randn(100, 60, generator=torch.Generator().manual_seed(0))
    whole, part = checksum(matrix), checksum(matrix[:, 2:50].clone())
    monkeypatch.setattr(checksums, "CHUNK", 7)
    assert checksum(matrix) == whole
    assert checksum(matrix[:, 2:50]) == part


@pytest.mark.parametrize("colocated", [False, True], ids=["joint", "handoff"])
def test_full_checks_every_piece_and_sample_all_of_them_in_turn(colocated: bool) -> None:
    plan = plan_of(DENSE, MegatronParallel(tp=2, pp=2), 1, 2, 1, colocated)
    params = [fill(layout, random_weights(DENSE)) for layout in plan.sources]
    pieces = sum(len(bucket.copies) for bucket in Exchange(plan, colocated).order)

    def verified(mode, versions) -> list[int]:
        exchange = Exchange(plan, colocated, mode=mode)
        return [sum(a.verified for _, a in exchange.run(params, version)[1]) for version in versions]

    assert verified("off", [1]) == [0]
    assert verified("full", [1, 2]) == [pieces, pieces]
    sampled = verified("sample", range(SAMPLE))
    assert sum(sampled) == pieces
    assert max(sampled) < pieces / 4


def test_a_damaged_slot_is_named() -> None:
    """Between the trainer's packing and the engine's reading, in the memory that both see."""
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 2, 1, colocated=True)
    exchange = Exchange(plan, colocated=True, mode="full")
    params = [fill(layout, random_weights(DENSE)) for layout in plan.sources]

    def damaged():
        for bucket, flat in exchange.inboxes[1].arrivals(exchange.order, 1):
            for copy, piece in bucket.views(flat):
                if copy.tensor == "model.layers.2.mlp.down_proj.weight":
                    piece.view(-1)[[0, 1]] = piece.view(-1)[[1, 0]]
            yield bucket, flat

    got = []

    def take() -> None:
        for name, _ in exchange.assembly(1).tensors(damaged()):
            got.append(name)

    *others, outcome = at_once(
        [exchange.sender(0, params[0]), exchange.sender(1, params[1]), exchange.receiver(0), take]
    )
    assert type(outcome) is RunFailure
    assert "model.layers.2.mlp.down_proj.weight" in str(outcome)
    assert "trainer rank 1" in str(outcome)
    assert "engine rank 1" in str(outcome)
    assert "model.layers.2.mlp.down_proj.weight" not in got
    assert any(isinstance(other, PeerGone) for other in others)


def test_checksums_take_room_only_when_they_are_asked_for() -> None:
    plan = plan_of(DENSE, MegatronParallel(), 1, 1, 1)
    for mode, room in (("off", 0), ("sample", 8), ("full", 8)):
        for bucket in Exchange(plan, mode=mode).order:
            assert bucket.nbytes == bucket.payload + room * len(bucket.copies)  # fp32 pairs: no rounding up


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_not_finite_weights_are_named_as_hugging_face_does(value: float) -> None:
    """The one of the three in a fused tensor that has it; padding does not count."""
    plan = plan_of(DENSE, MegatronParallel(tp=2), 1, 2, 1)
    layout = plan.sources[0]
    params = fill(layout, random_weights(DENSE))
    assert not_finite(layout, params) == []
    piece = next(p for p in layout.pieces if p.tensor == "model.layers.1.self_attn.k_proj.weight")
    params[piece.local][piece.at] = value
    params["output_layer.weight"][100] = value  # of 70 rows
    params["decoder.final_layernorm.weight"][3] = value
    assert not_finite(layout, params) == ["model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
