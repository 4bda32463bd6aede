"""Plans: what they prove, how they balance, and how copies are packed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from grpo_mlm.layouts.boxes import Layout, Piece, volume
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, Rope, canonical_tensors
from grpo_mlm.layouts.planner import PlanError, buckets, make_plan
from grpo_mlm.layouts.spec import Moe
from grpo_mlm.layouts.vllm import vllm_layout

TINY = ModelSpec("qwen3", 8, 2, 4, 2, 4, 12, 70, False, False, False, True, 1e-6, Rope(10000.0), 64)
LARGE = ModelSpec(
    "llama", 8192, 80, 64, 8, 128, 28672, 128256, False, False, False, False, 1e-5, Rope(5e5), 8192
)


def sides() -> tuple[list[Layout], list[Layout]]:
    return megatron_layouts(TINY, MegatronParallel(2, 1), 1), [vllm_layout(TINY, 2, t) for t in range(2)]


def without(layout: Layout, tensor: str) -> Layout:
    return replace(layout, pieces=tuple(p for p in layout.pieces if p.tensor != tensor))


def renamed(layout: Layout, old: str, new: str) -> Layout:
    pieces = tuple(replace(p, tensor=new) if p.tensor == old else p for p in layout.pieces)
    return replace(layout, pieces=pieces)


K = "model.layers.1.self_attn.k_proj.weight"


def test_a_dropped_piece_is_an_error_that_names_the_tensor() -> None:
    """WSY-09, on either side."""
    src, dst = sides()
    with pytest.raises(
        PlanError, match=r"layers\.1\.self_attention\.linear_qkv\.weight: .* by nothing.*source 0"
    ):
        make_plan([without(src[0], K), src[1]], dst)
    with pytest.raises(
        PlanError, match=r"layers\.1\.self_attn\.qkv_proj\.weight: .* by nothing.*destination 1"
    ):
        make_plan(src, [dst[0], without(dst[1], K)])


def test_a_duplicated_piece_is_an_error_that_names_the_tensor() -> None:
    src, dst = sides()
    twice = replace(dst[0], pieces=(*dst[0].pieces, next(p for p in dst[0].pieces if p.tensor == K)))
    with pytest.raises(PlanError, match=r"layers\.1\.self_attn\.qkv_proj\.weight: filled twice"):
        make_plan(src, [twice, dst[1]])


def test_a_piece_over_padding_is_an_error_that_names_the_tensor() -> None:
    src, dst = sides()
    over = replace(dst[1], fills=(*dst[1].fills, ("model.norm.weight", ((0, 2),))))
    with pytest.raises(PlanError, match=r"model\.norm\.weight: filled twice in \(\(0, 2\),\)"):
        make_plan(src, [dst[0], over])


def test_a_renamed_tensor_is_an_error_that_names_both_names() -> None:
    src, dst = sides()
    with pytest.raises(PlanError) as error:
        make_plan(src, [renamed(layout, K, "model.layers.1.self_attn.key.weight") for layout in dst])
    assert "model.layers.1.self_attn.key.weight" in str(error.value)
    assert "held by none" in str(error.value)
    assert f"{K} ((0, 4), (0, 8)): held by the sources, taken by no destination" in str(error.value)


def test_a_missing_source_rank_is_an_error() -> None:
    src, dst = sides()
    with pytest.raises(PlanError, match=r"mlp\.down_proj\.weight .* held by none"):
        make_plan(src[:1], dst)


def test_a_tensor_that_no_destination_takes_is_an_error() -> None:
    """A model with one layer more on the source side does not pass silently."""
    deeper = megatron_layouts(replace(TINY, layers=3), MegatronParallel(1, 1), 1)
    with pytest.raises(PlanError, match=r"model\.layers\.2\..*taken by no destination"):
        make_plan(deeper, [hf_layout(TINY)])


def test_a_piece_out_of_bounds_or_without_a_shape_is_an_error() -> None:
    layout = Layout({"x": (4,)}, (Piece("w", ((0, 4),), "x", (1,)),))
    with pytest.raises(PlanError, match=r"x: box .* does not lie in shape"):
        make_plan([layout], [layout])
    with pytest.raises(PlanError, match="y: has pieces but no shape"):
        make_plan([Layout({}, (Piece("w", ((0, 4),), "y", (0,)),))], [])


def test_replicas_cut_differently_still_cover_each_element_once() -> None:
    """Sources [0:6), [4:10) and a replica [0:10): no element is sent twice."""
    cuts = [((0, 6),), ((4, 10),), ((0, 10),)]
    src = [Layout({"x": (b - a,)}, (Piece("w", ((a, b),), "x", (0,)),)) for ((a, b),) in cuts]
    dst = [Layout({"y": (10,)}, (Piece("w", ((0, 10),), "y", (0,)),))] * 3
    plan = make_plan(src, dst)
    for rank in range(3):
        got = Counter(i for c in plan.copies if c.dst == rank for i in range(*c.dst_box[0]))
        assert got == Counter(range(10))


def test_equal_digests_are_equal_copies() -> None:
    src, dst = sides()
    plan = make_plan(src, dst)
    own = [replace(layout) for layout in src]  # equal, but other objects, as another process has them
    assert plan.digest == make_plan(own, list(dst)).digest
    assert list(plan.copies) == list(make_plan(own, list(dst)).copies)
    changed = [
        make_plan(src, dst[::-1]),
        make_plan(src, dst * 2),
        make_plan([renamed(layout, K, "k") for layout in src], [renamed(layout, K, "k") for layout in dst]),
        make_plan([src[0], relabelled(src[1])], dst),
    ]
    assert len({plan.digest, *(other.digest for other in changed)}) == 5


def test_the_digest_tells_plans_apart_that_differ_in_who_sends() -> None:
    src, dst = sides()
    nodes = ["a", "a", "b", "b", "a", "a"]
    here, there = (make_plan(src * 2, dst, node_of=n) for n in (nodes, [*nodes[:4], "b", "b"]))
    assert here.traffic.sum() == there.traffic.sum()
    assert here.digest != there.digest
    assert {s for s, _ in here.pairs} == {0, 1}
    assert {s for s, _ in there.pairs} == {2, 3}


def relabelled(layout: Layout) -> Layout:
    """The same tensors under other local names."""
    return Layout(
        {f"x.{name}": shape for name, shape in layout.shapes.items()},
        tuple(replace(piece, local=f"x.{piece.local}") for piece in layout.pieces),
        tuple((f"x.{name}", box) for name, box in layout.fills),
    )


def test_a_source_on_the_same_node_is_preferred() -> None:
    src = megatron_layouts(TINY, MegatronParallel(1, 1), 4)
    dst = [vllm_layout(TINY, 1, 0)] * 2
    plan = make_plan(src, dst, node_of=["a", "a", "b", "b", "b", "a"])
    assert {(c.src, c.dst) for c in plan.copies} == {(2, 0), (3, 0), (0, 1), (1, 1)}


def test_a_large_model_moves_each_byte_once_and_loads_its_sources_evenly() -> None:
    """64 trainer ranks (TP8 x DP8) to 8 engine ranks of a 70B model."""
    src = megatron_layouts(LARGE, MegatronParallel(8, 1), 8)
    dst = [vllm_layout(LARGE, 8, t) for t in range(8)]
    plan = make_plan(src, dst)
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for c in plan.copies:
        received[c.dst] += volume(c.box)
        sent[c.src] += volume(c.box)
    norms = (2 * 80 + 1) * 8192
    whole = sum(volume(tuple((0, n) for n in shape)) for shape in canonical_tensors(LARGE).values())
    assert set(received.values()) == {(whole - norms) // 8 + norms}
    assert max(sent.values()) <= 1.05 * sum(sent.values()) / 64
    assert len(sent) == 64


def test_the_numbers_of_a_32b_model_are_those_worked_out_by_hand() -> None:
    """Qwen3-32B, TP8 x DP8 to eight engines of TP4, in bfloat16."""
    qwen = ModelSpec(
        "qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False, False, False, True, 1e-6, Rope(1e6), 40960
    )
    src = megatron_layouts(qwen, MegatronParallel(8, 1), 8)
    plan = make_plan(src, [vllm_layout(qwen, 4, t) for t in range(4)] * 8)
    # A quarter of all matrices, 16,380,723,200 bytes, and all norms: (2 x 64 + 1) x 5120 + 2 x 64 x 128 elements.
    assert [2 * n for n in plan.ingress()] == [16_380_723_200 + 1_353_728] * 32
    assert 2 * sum(plan.egress()) == 32 * 16_382_076_928
    assert 2 * max(plan.egress()) == pytest.approx(8.191e9, rel=0.001)  # all / 64


@pytest.mark.parametrize("ep", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_235b_mixture_of_experts_goes_from_256_ranks_to_128(ep: bool) -> None:
    """Qwen3-235B-A22B, TP4 x EP8 x PP2 to sixteen engines of eight ranks, millions of copies."""
    qwen = ModelSpec(
        "qwen3_moe", 4096, 94, 64, 4, 128, 12288, 151936, False, False, False, True, 1e-6, Rope(1e6), 40960,
        Moe(experts=128, top_k=8, ffn=1536, norm_topk_prob=True),
    )  # fmt: skip
    src = megatron_layouts(qwen, MegatronParallel(4, 2, ep=8, etp=1), 32)
    plan = make_plan(src, [vllm_layout(qwen, 8, t, ep=ep) for t in range(8)] * 16)
    experts = 94 * 128 * 3 * 1536 * 4096
    q_and_o, k_and_v = 94 * 2 * 64 * 128 * 4096, 94 * 2 * 4 * 128 * 4096
    ends, router = 2 * 151936 * 4096, 94 * 128 * 4096
    norms = (2 * 94 + 1) * 4096 + 2 * 94 * 128
    # Eight ranks share four key-value heads, so each holds one whole head; router and norms are on every rank.
    each = (experts + q_and_o + ends) // 8 + k_and_v // 4 + router + norms
    assert plan.ingress() == [each] * 128
    assert sum(plan.egress()) == 128 * each
    assert max(plan.egress()) <= 1.05 * 128 * each / 256
    assert len(plan.copies) >= 128 * (36096 // 8 if ep else 36096)
    src_rank, dst_rank = plan.pairs[1000]
    assert sum(volume(c.box) for c in plan.sends(src_rank, dst_rank)) == plan.traffic[src_rank, dst_rank]


def test_sends_are_in_the_order_in_which_the_receiver_lists_its_tensors() -> None:
    src, dst = sides()
    plan = make_plan(src, dst)
    for rank in range(2):
        order = [c.dst_local for c in plan.sends(0, rank)]
        assert list(dict.fromkeys(order)) == [name for name in dst[rank].shapes if name in set(order)]
    assert sum(len(plan.sends(s, d)) for s in range(2) for d in range(2)) == len(plan.copies)
    assert plan.sends(1, 7) == ()
    assert plan.sends(7, 1) == ()


def test_copies_are_those_of_all_pairs_and_come_again() -> None:
    src, dst = sides()
    plan = make_plan(src * 2, dst * 3)
    copies = list(plan.copies)
    assert copies == list(plan.copies)
    assert [c.dst for c in copies] == sorted(c.dst for c in copies)
    assert Counter(copies) == Counter(c for pair in plan.pairs for c in plan.sends(*pair))
    assert set(plan.pairs) == {(c.src, c.dst) for c in copies}
    assert plan.pairs == sorted(plan.pairs, key=lambda pair: pair[::-1])
    for rank in range(4):
        assert plan.egress()[rank] == sum(volume(c.box) for c in copies if c.src == rank)
    for rank in range(6):
        assert plan.ingress()[rank] == sum(volume(c.box) for c in copies if c.dst == rank)


@pytest.mark.parametrize("bucket_bytes", [1, 7, 64, 1000, 10**9])
def test_buckets_hold_every_element_once_in_order_and_stay_below_their_size(bucket_bytes: int) -> None:
    src, dst = sides()
    copies = make_plan(src, dst).sends(1, 1)
    packed = buckets(copies, 2, bucket_bytes)
    sizes = [2 * sum(volume(c.box) for c in bucket) for bucket in packed]
    assert all(0 < size <= max(bucket_bytes, 2) for size in sizes)
    assert sum(sizes) == 2 * sum(volume(c.box) for c in copies)
    flat = [c for bucket in packed for c in bucket]
    for c in flat:
        assert volume(c.src_box) == volume(c.dst_box) == volume(c.box)
    places = Counter((c.dst_local, *cell) for c in flat for cell in cells(c.dst_box))
    assert set(places.values()) == {1}
    assert places == Counter((c.dst_local, *cell) for c in copies for cell in cells(c.dst_box))
    if bucket_bytes == 10**9:
        assert packed == [list(copies)]


def cells(box: tuple[tuple[int, int], ...]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = [()]
    for start, stop in box:
        out = [(*cell, i) for cell in out for i in range(start, stop)]
    return out


def test_a_split_copy_keeps_source_and_destination_in_step() -> None:
    src = [Layout({"x": (4, 6)}, (Piece("w", ((0, 4), (0, 6)), "x", (0, 0)),))]
    dst = [Layout({"y": (2, 6)}, (Piece("w", ((2, 4), (0, 6)), "y", (0, 0)),), ())]
    dst += [Layout({"y": (2, 6)}, (Piece("w", ((0, 2), (0, 6)), "y", (0, 0)),))]
    [first, second, third, fourth] = buckets(make_plan(src, dst).sends(0, 0), 1, 4)
    assert [c.src_box for c in (*first, *second)] == [((2, 3), (0, 4)), ((2, 3), (4, 6))]
    assert [c.dst_box for c in (*third, *fourth)] == [((1, 2), (0, 4)), ((1, 2), (4, 6))]
