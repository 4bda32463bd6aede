"""The two engines' views against slicing written with plain torch operations, and round trips through plans.

The references below know nothing of boxes: they view, concatenate and chunk whole tensors as megatron-core and
vLLM do.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.functional import pad

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Layout, slices
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron import (
    LOCAL,
    TE,
    Coordinates,
    MegatronParallel,
    megatron_layout,
    megatron_layouts,
)
from grpo_mlm.layouts.model import ModelSpec, Rope, canonical_tensors
from grpo_mlm.layouts.planner import Plan, make_plan
from grpo_mlm.layouts.vllm import vllm_layout

Tensors = dict[str, torch.Tensor]


def random_spec(seed: int) -> ModelSpec:
    """A small model that every size used below divides: 4 | heads, ffn, layers; any vocabulary, head_dim, groups."""
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 4, 8])
    heads = kv_heads * rng.choice([n for n in (1, 2, 3, 4) if kv_heads * n % 4 == 0])
    return ModelSpec(
        family=rng.choice(["llama", "qwen2", "qwen3"]),
        hidden_size=rng.choice([6, 8, 12]),
        layers=4,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice([4, 6]),
        ffn=4 * rng.choice([1, 3, 5]),
        vocab_size=rng.choice([1, 63, 64, 65, 128, 300, 512]),
        tied=rng.random() < 0.5,
        qkv_bias=rng.random() < 0.5,
        o_bias=rng.random() < 0.3,
        qk_norm=rng.random() < 0.5,
        norm_eps=1e-6,
        rope=Rope(10000.0),
        max_position_embeddings=64,
    )


def random_weights(spec: ModelSpec) -> Tensors:
    """Canonical tensors in which every element of the model has a value of its own, none of them zero."""
    weights, start = {}, 1
    for name, shape in canonical_tensors(spec).items():
        n = torch.Size(shape).numel()
        weights[name] = torch.arange(start, start + n, dtype=torch.float64).view(shape)
        start += n
    return weights


def megatron_reference(spec: ModelSpec, weights: Tensors, tp: int, pp: int, t: int, p: int) -> Tensors:
    """What megatron-core's rank (t, p) holds, cut out of the full tensors."""
    multiple = 128 * tp
    padding = -spec.vocab_size % multiple
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    out: Tensors = {}
    if p == 0:
        table = pad(weights["model.embed_tokens.weight"], (0, 0, 0, padding))
        out["embedding.word_embeddings.weight"] = table.chunk(tp, 0)[t]
    for local, layer in enumerate(range(p * spec.layers // pp, (p + 1) * spec.layers // pp)):
        hf, mine = f"model.layers.{layer}.", f"decoder.layers.{local}."
        out[mine + "input_layernorm.weight"] = weights[hf + "input_layernorm.weight"]
        out[mine + "pre_mlp_layernorm.weight"] = weights[hf + "post_attention_layernorm.weight"]
        for kind in ["weight", "bias"] if spec.qkv_bias else ["weight"]:
            parts = [weights[f"{hf}self_attn.{x}_proj.{kind}"] for x in "qkv"]
            groups = [part.reshape(spec.kv_heads, -1, *part.shape[1:]) for part in parts]
            fused = torch.cat(groups, dim=1).reshape(-1, *parts[0].shape[1:])
            out[f"{mine}self_attention.linear_qkv.{kind}"] = fused.chunk(tp, 0)[t]
        if spec.qk_norm:
            for x in "qk":
                out[f"{mine}self_attention.{x}_layernorm.weight"] = weights[f"{hf}self_attn.{x}_norm.weight"]
        out[mine + "self_attention.linear_proj.weight"] = weights[hf + "self_attn.o_proj.weight"].chunk(
            tp, 1
        )[t]
        if spec.o_bias:
            out[mine + "self_attention.linear_proj.bias"] = weights[hf + "self_attn.o_proj.bias"]
        gate, up = (weights[f"{hf}mlp.{x}_proj.weight"].chunk(tp, 0)[t] for x in ("gate", "up"))
        out[mine + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out[mine + "mlp.linear_fc2.weight"] = weights[hf + "mlp.down_proj.weight"].chunk(tp, 1)[t]
    if p == pp - 1:
        out["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
        if pp > 1 or not spec.tied:
            out["output_layer.weight"] = pad(head, (0, 0, 0, padding)).chunk(tp, 0)[t]
    return out


def vllm_reference(spec: ModelSpec, weights: Tensors, tp: int, t: int) -> Tensors:
    """What vLLM's rank t holds before its kernels re-lay it out, cut out of the full tensors."""
    padding = -spec.vocab_size % 64
    out: Tensors = {}
    for name in ["model.embed_tokens.weight"] + ([] if spec.tied else ["lm_head.weight"]):
        out[name] = pad(weights[name], (0, 0, 0, padding)).chunk(tp, 0)[t]
    out["model.norm.weight"] = weights["model.norm.weight"]
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        for kind in ["weight", "bias"] if spec.qkv_bias else ["weight"]:
            q, k, v = (weights[f"{at}self_attn.{x}_proj.{kind}"] for x in "qkv")
            if tp > spec.kv_heads:
                heads = [x.reshape(spec.kv_heads, spec.head_dim, *x.shape[1:]) for x in (k, v)]
                k, v = (torch.repeat_interleave(x, tp // spec.kv_heads, dim=0)[t] for x in heads)
            else:
                k, v = k.chunk(tp, 0)[t], v.chunk(tp, 0)[t]
            out[f"{at}self_attn.qkv_proj.{kind}"] = torch.cat([q.chunk(tp, 0)[t], k, v])
        out[at + "self_attn.o_proj.weight"] = weights[at + "self_attn.o_proj.weight"].chunk(tp, 1)[t]
        gate, up = (weights[f"{at}mlp.{x}_proj.weight"].chunk(tp, 0)[t] for x in ("gate", "up"))
        out[at + "mlp.gate_up_proj.weight"] = torch.cat([gate, up])
        out[at + "mlp.down_proj.weight"] = weights[at + "mlp.down_proj.weight"].chunk(tp, 1)[t]
        whole = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        whole += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] if spec.qk_norm else []
        whole += ["self_attn.o_proj.bias"] if spec.o_bias else []
        for name in whole:
            out[at + name] = weights[at + name]
    return out


def held(layout: Layout, weights: Tensors) -> Tensors:
    """A rank's tensors by its layout: pieces copied, padding zero, anything that nothing fills NaN."""
    out = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        out[piece.local][slices(piece.local_box)] = weights[piece.tensor][slices(piece.box)]
    for name, box in layout.fills:
        out[name][slices(box)] = 0
    return out


def executed(plan: Plan, sources: list[Tensors]) -> list[Tensors]:
    """Every destination's tensors after the plan's copies."""
    out = [held(Layout(layout.shapes, (), layout.fills), {}) for layout in plan.destinations]
    for c in plan.copies:
        out[c.dst][c.dst_local][slices(c.dst_box)] = sources[c.src][c.src_local][slices(c.src_box)]
    return out


def assert_same(got: Tensors, wanted: Tensors) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name


TRAINERS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 4)]


@pytest.mark.parametrize("tp_pp", TRAINERS)
@pytest.mark.parametrize("seed", range(12))
def test_a_megatron_rank_holds_what_plain_slicing_gives(seed: int, tp_pp: tuple[int, int]) -> None:
    spec, (tp, pp) = random_spec(seed), tp_pp
    weights = random_weights(spec)
    for p in range(pp):
        for t in range(tp):
            layout = megatron_layout(spec, MegatronParallel(tp, pp), Coordinates(t, p))
            assert_same(held(layout, weights), megatron_reference(spec, weights, tp, pp, t, p))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_a_vllm_rank_holds_what_plain_slicing_gives(seed: int, tp: int) -> None:
    spec = random_spec(seed)
    weights = random_weights(spec)
    for t in range(tp):
        assert_same(held(vllm_layout(spec, tp, t), weights), vllm_reference(spec, weights, tp, t))


@pytest.mark.parametrize("tp_pp", TRAINERS)
@pytest.mark.parametrize("seed", range(12))
def test_hf_to_megatron_to_hf_gives_every_tensor_back(seed: int, tp_pp: tuple[int, int]) -> None:
    """CNV-01, CNV-04: tied or not, every layer of every stage, bit for bit, none missing and none extra."""
    spec, (tp, pp) = random_spec(seed), tp_pp
    weights = random_weights(spec)
    ranks = megatron_layouts(spec, MegatronParallel(tp, pp), dp=1)
    trained = executed(make_plan([hf_layout(spec)], ranks), [weights])
    for rank, tensors in enumerate(trained):
        assert_same(tensors, megatron_reference(spec, weights, tp, pp, rank % tp, rank // tp))
    [files] = executed(make_plan(ranks, [hf_layout(spec)]), trained)
    assert_same(files, weights)


@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("tp_pp_dp", [(1, 1, 1), (2, 2, 1), (4, 1, 2), (1, 4, 2)])
@pytest.mark.parametrize("seed", range(6))
def test_megatron_to_vllm_gives_each_engine_rank_its_own_slices(
    seed: int, tp_pp_dp: tuple[int, int, int], rollout_tp: int
) -> None:
    """WSY-06: no two ranks get the same shard, whatever the two sizes are."""
    spec, (tp, pp, dp) = random_spec(100 + seed), tp_pp_dp
    weights = random_weights(spec)
    src = megatron_layouts(spec, MegatronParallel(tp, pp), dp)
    sources = [held(layout, weights) for layout in src]
    plan = make_plan(src, [vllm_layout(spec, rollout_tp, t) for t in range(rollout_tp)])
    for t, tensors in enumerate(executed(plan, sources)):
        assert_same(tensors, vllm_reference(spec, weights, rollout_tp, t))


def test_fewer_query_groups_than_ranks_leaves_some_ranks_without_keys_or_values() -> None:
    spec = random_spec(0)
    spec = ModelSpec(**{**vars(spec), "heads": 8, "kv_heads": 2, "head_dim": 4})
    fused = "decoder.layers.0.self_attention.linear_qkv.weight"
    layouts = [megatron_layout(spec, MegatronParallel(4, 1), Coordinates(t)) for t in range(4)]
    owned = [{p.tensor.split(".")[-2] for p in layout.pieces if p.local == fused} for layout in layouts]
    # Each group is 4 q heads, 1 k, 1 v of 4 rows: 24 rows, two ranks of 12 rows each.
    assert owned == [{"q_proj"}, {"q_proj", "k_proj", "v_proj"}] * 2


def test_padded_rows_are_declared_and_everything_else_is_covered() -> None:
    spec = ModelSpec(**{**vars(random_spec(1)), "vocab_size": 300, "tied": False, "hidden_size": 8})
    fills = [megatron_layout(spec, MegatronParallel(2, 1), Coordinates(t)).fills for t in range(2)]
    # 300 rows are padded to 512 for two ranks of 256: the second holds rows 256-299, then 212 of padding.
    both = ("embedding.word_embeddings.weight", "output_layer.weight")
    assert fills == [(), tuple((name, ((44, 256), (0, 8))) for name in both)]
    assert vllm_layout(spec, 1, 0).fills[0] == ("model.embed_tokens.weight", ((300, 320), (0, 8)))


def test_transformer_engine_names_differ_in_the_fused_norms_only() -> None:
    spec, par = random_spec(2), MegatronParallel(2, 2)
    local, te = (megatron_layout(spec, par, Coordinates(1, 1), naming) for naming in (LOCAL, TE))
    renamed = {
        "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.pre_mlp_layernorm.weight": "decoder.layers.1.mlp.linear_fc1.layer_norm_weight",
    }
    assert renamed.keys() <= local.shapes.keys()
    assert set(renamed.values()) <= te.shapes.keys()
    assert len(local.shapes) == len(te.shapes)
    assert local.shapes.keys() - te.shapes.keys() == {
        name.replace(".1.", f".{layer}.") for name in renamed for layer in (0, 1)
    }


@pytest.mark.parametrize(
    ("changes", "par", "named"),
    [
        ({"heads": 6, "kv_heads": 2}, MegatronParallel(4, 1), "attention heads"),
        ({"heads": 12, "kv_heads": 3}, MegatronParallel(2, 1), "key-value heads"),
        ({"layers": 3}, MegatronParallel(1, 2), "layers"),
        ({"ffn": 10}, MegatronParallel(4, 1), "intermediate size"),
    ],
)
def test_sizes_that_do_not_divide_are_the_users_error(
    changes: dict, par: MegatronParallel, named: str
) -> None:
    spec = ModelSpec(**{**vars(random_spec(3)), "heads": 8, "kv_heads": 4, **changes})
    with pytest.raises(UserError, match=named):
        megatron_layout(spec, par, Coordinates())


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"heads": 6, "kv_heads": 2}, "attention heads"), ({"heads": 12, "kv_heads": 3}, "key-value heads")],
)
def test_rollout_sizes_that_do_not_divide_are_the_users_error(changes: dict, named: str) -> None:
    spec = ModelSpec(**{**vars(random_spec(3)), **changes})
    with pytest.raises(UserError, match=named):
        vllm_layout(spec, 4, 0)
