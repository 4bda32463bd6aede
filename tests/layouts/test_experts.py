"""Experts, model chunks and uneven stages: the views against plain torch slicing, and round trips through plans."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import volume
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron import LOCAL, TE, MegatronParallel, Naming, chunk_layers, megatron_layouts
from grpo_mlm.layouts.model import ModelSpec, Rope, canonical_tensors
from grpo_mlm.layouts.planner import make_plan
from grpo_mlm.layouts.spec import Moe
from grpo_mlm.layouts.vllm import vllm_layout
from tests.layouts.test_views import Tensors, assert_same, executed, held, random_weights

NAMES = {
    "qwen3_moe": ("mlp", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("block_sparse_moe", "w1", "w3", "w2"),
}


def moe_spec(family: str = "qwen3_moe", layers: int = 4, tied: bool = False) -> ModelSpec:
    qk_norm = family == "qwen3_moe"
    moe = Moe(experts=8, top_k=2, ffn=12, norm_topk_prob=True)
    return ModelSpec(
        family, 8, layers, 8, 4, 4, 20, 70, tied, False, False, qk_norm, 1e-6, Rope(10000.0), 64, moe
    )


def expert(spec: ModelSpec, weights: Tensors, layer: int, e: int) -> tuple[torch.Tensor, ...]:
    """gate, up, down of one expert."""
    block, *matrices = NAMES[spec.family]
    return tuple(weights[f"model.layers.{layer}.{block}.experts.{e}.{x}.weight"] for x in matrices)


SIZES = [
    (MegatronParallel(ep=2), 2),
    (MegatronParallel(ep=4, pp=2), 4),
    (MegatronParallel(tp=2, ep=2, etp=1), 1),
    (MegatronParallel(tp=2, ep=2), 2),
    (MegatronParallel(tp=2, ep=2, etp=2), 4),
    (MegatronParallel(tp=4, ep=2, etp=2), 1),
    (MegatronParallel(ep=1, etp=2), 2),
]


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("par", "dp"), SIZES)
def test_a_rank_holds_its_experts_and_no_others(family: str, par: MegatronParallel, dp: int) -> None:
    """CNV-03: local expert i of expert rank r is expert r * (experts / ep) + i, cut by expert tensor rank."""
    spec = moe_spec(family)
    weights = random_weights(spec)
    each, block = 8 // par.ep, par.tp * dp
    for rank, layout in enumerate(megatron_layouts(spec, par, dp)):
        tensors = held(layout, weights)
        pp_rank, i = divmod(rank, block)
        etp_rank, ep_rank = i % par.expert_tp, i // par.expert_tp % par.ep
        found = 0
        for local, e in product(range(4 // par.pp), range(each)):
            gate, up, down = expert(spec, weights, pp_rank * (4 // par.pp) + local, ep_rank * each + e)
            gate, up = (x.chunk(par.expert_tp, 0)[etp_rank] for x in (gate, up))
            at = f"decoder.layers.{local}.mlp.experts.local_experts.{e}."
            assert torch.equal(tensors[at + "linear_fc1.weight"], torch.cat([gate, up]))
            assert torch.equal(tensors[at + "linear_fc2.weight"], down.chunk(par.expert_tp, 1)[etp_rank])
            found += 2
        assert found == sum(".experts." in name for name in tensors)


@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("par", "dp"), SIZES)
def test_experts_come_back_from_every_cut(family: str, par: MegatronParallel, dp: int) -> None:
    spec = moe_spec(family, tied=dp == 2)
    weights = random_weights(spec)
    ranks = megatron_layouts(spec, par, dp)
    trained = executed(make_plan([hf_layout(spec)], ranks), [weights])
    [files] = executed(make_plan(ranks, [hf_layout(spec)]), trained)
    assert_same(files, weights)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", NAMES)
def test_an_engine_rank_holds_its_experts_in_two_matrices(family: str, tp: int, ep: bool) -> None:
    spec = moe_spec(family)
    weights = random_weights(spec)
    ranks = megatron_layouts(spec, MegatronParallel(ep=2, pp=2), 2)
    plan = make_plan(ranks, [vllm_layout(spec, tp, t, ep) for t in range(tp)])
    for t, tensors in enumerate(executed(plan, [held(layout, weights) for layout in ranks])):
        for layer in range(spec.layers):
            w13, w2 = [], []
            for e in range(8 // tp * t, 8 // tp * (t + 1)) if ep else range(8):
                gate, up, down = expert(spec, weights, layer, e)
                if not ep:
                    gate, up, down = gate.chunk(tp)[t], up.chunk(tp)[t], down.chunk(tp, 1)[t]
                w13.append(torch.cat([gate, up]))
                w2.append(down)
            at = f"model.layers.{layer}.{NAMES[family][0]}.experts.routed_experts."
            assert torch.equal(tensors[at + "w13_weight"], torch.stack(w13).flatten(0, 1))
            assert torch.equal(tensors[at + "w2_weight"], torch.stack(w2).flatten(0, 1))


def test_experts_that_do_not_divide_the_ranks_of_an_engine() -> None:
    """vLLM gives the first ranks one more: 8 experts on 3 ranks are 3, 3 and 2."""
    spec = replace(moe_spec(), heads=6, kv_heads=3, vocab_size=192)
    w2 = "model.layers.0.mlp.experts.routed_experts.w2_weight"
    shapes = [vllm_layout(spec, 3, t, ep=True).shapes[w2] for t in range(3)]
    assert shapes == [(3 * 8, 12), (3 * 8, 12), (2 * 8, 12)]


@pytest.mark.parametrize("family", NAMES)
def test_files_may_hold_all_experts_of_a_layer_in_one_tensor(family: str) -> None:
    spec = moe_spec(family)
    weights = random_weights(spec)
    fused = {}
    for layer in range(spec.layers):
        gates, ups, downs = zip(*(expert(spec, weights, layer, e) for e in range(8)), strict=True)
        at = f"model.layers.{layer}.mlp.experts."
        both = [torch.cat(pair) for pair in zip(gates, ups, strict=True)]
        fused[at + "gate_up_proj"] = torch.stack(both).flatten(0, 1)
        fused[at + "down_proj"] = torch.stack(downs).flatten(0, 1)
    fused |= {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    layout = hf_layout(spec, fused.keys())
    assert_same(held(layout, weights), fused)
    [apart] = executed(make_plan([layout], [hf_layout(spec)]), [fused])
    assert_same(apart, weights)


def test_fused_names_of_grouped_experts() -> None:
    """TEGroupedMLP numbers its weights; TE keeps the norm before the experts as a module of its own."""
    spec, par = moe_spec(), MegatronParallel(ep=2)
    one, same = (megatron_layouts(spec, par, 2, naming)[1] for naming in (TE, Naming(te=True)))
    at = "decoder.layers.0.mlp.experts."
    assert one.shapes[f"{at}linear_fc1.weight3"] == same.shapes[f"{at}local_experts.3.linear_fc1.weight"]
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in one.shapes
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in one.shapes
    local = megatron_layouts(spec, par, 2, LOCAL)[1]
    assert [p.box for p in local.pieces] == [p.box for p in one.pieces]


@pytest.mark.parametrize(
    ("par", "layers", "wanted"),
    [
        (MegatronParallel(pp=2, vpp=2), 8, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (MegatronParallel(pp=3, first_stage_layers=1), 7, [[(0, 1)], [(1, 4)], [(4, 7)]]),
        (MegatronParallel(pp=2, last_stage_layers=1), 4, [[(0, 3)], [(3, 4)]]),
        (MegatronParallel(pp=2, first_stage_layers=3, last_stage_layers=2), 5, [[(0, 3)], [(3, 5)]]),
        (
            MegatronParallel(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=4),
            10,
            [[(0, 1), (5, 6)], [(1, 3), (6, 8)], [(3, 5), (8, 10)]],
        ),
    ],
)
def test_layers_of_chunks_and_uneven_stages(
    par: MegatronParallel, layers: int, wanted: list[list[tuple[int, int]]]
) -> None:
    """CNV-04; by hand from the rule that stages take turns, chunk after chunk."""
    spec = moe_spec(layers=layers)
    found = [[chunk_layers(spec, par, p, v) for v in range(par.vpp)] for p in range(par.pp)]
    assert [[(r.start, r.stop) for r in stage] for stage in found] == wanted


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "par",
    [
        MegatronParallel(tp=2, pp=2, vpp=2),
        MegatronParallel(pp=2, vpp=4),
        MegatronParallel(tp=2, pp=3, vpp=2, first_stage_layers=2, last_stage_layers=2),
        MegatronParallel(pp=2, ep=2, etp=1, last_stage_layers=3),
    ],
)
def test_every_layer_of_every_chunk_comes_back(par: MegatronParallel, tied: bool) -> None:
    spec = moe_spec(layers=8, tied=tied)
    weights = random_weights(spec)
    ranks = megatron_layouts(spec, par, 2)
    prefixes = {name.split("decoder")[0] for layout in ranks for name in layout.shapes if "decoder" in name}
    assert prefixes == ({f"chunk{v}." for v in range(par.vpp)} if par.vpp > 1 else {""})
    trained = executed(make_plan([hf_layout(spec)], ranks), [weights])
    [files] = executed(make_plan(ranks, [hf_layout(spec)]), trained)
    assert_same(files, weights)
    heads = Counter(name.split(".")[-2] for layout in ranks for name in layout.shapes)
    assert heads["word_embeddings"] == heads["output_layer"] == 2 * par.tp


@pytest.mark.parametrize(
    ("par", "dp", "named"),
    [
        (MegatronParallel(ep=3), 3, "number of experts"),
        (MegatronParallel(ep=4), 2, "expert parallel size 4"),
        (MegatronParallel(etp=8), 8, "intermediate size"),
        (MegatronParallel(vpp=2), 1, "need a pipeline"),
        (MegatronParallel(pp=2, vpp=3), 1, "number of layers of a pipeline stage"),
        (MegatronParallel(pp=2, first_stage_layers=5), 1, "leave -1"),
        (MegatronParallel(pp=2, first_stage_layers=1, last_stage_layers=2), 1, "leave 1 for 0 other"),
    ],
)
def test_sizes_that_do_not_fit_are_the_users_error(par: MegatronParallel, dp: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        megatron_layouts(moe_spec(), par, dp)


def test_qwen3_30b_a3b_has_the_published_sizes() -> None:
    """facts: 3.082 GB outside of the experts and 57.98 GB in them, bf16."""
    moe = Moe(experts=128, top_k=8, ffn=768, norm_topk_prob=True)
    spec = replace(
        moe_spec(),
        hidden_size=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        moe=moe,
    )
    size: Counter[bool] = Counter()
    for name, shape in canonical_tensors(spec).items():
        size[".experts." in name] += 2 * volume(tuple((0, n) for n in shape))
    assert size[True] == 48 * 128 * 3 * 768 * 2048 * 2 == 57_982_058_496
    assert round(size[False] / 1e9, 3) == 3.082
