"""Distributed checkpoints' tensors against plain torch stacking, and what is said of checkpoints that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_mlm.errors import NamesDiffer
from grpo_mlm.layouts.coverage import layout_faults
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron_dist import dist_layout, extra_state_keys, is_model_key, stored_layout
from grpo_mlm.layouts.model import ModelSpec, Rope
from grpo_mlm.layouts.planner import make_plan
from tests.layouts.test_experts import expert, moe_spec
from tests.layouts.test_views import assert_same, executed, held, random_weights

QWEN2 = ModelSpec("qwen2", 8, 3, 4, 2, 4, 6, 130, False, True, False, False, 1e-6, Rope(10000.0), 64)


def test_layers_are_stacked() -> None:
    """By hand: one query group is two q heads, one k head, one v head, 4 rows each."""
    weights = random_weights(QWEN2)
    layout = dist_layout(QWEN2)
    tensors = {name: t.view(layout.stored[name]) for name, t in held(layout, weights).items()}
    assert tensors.keys() == {
        "embedding.word_embeddings.weight",
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.self_attention.linear_qkv.weight",
        "decoder.layers.self_attention.linear_qkv.bias",
        "decoder.layers.self_attention.linear_proj.weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.weight",
        "decoder.layers.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    for layer in range(3):
        at = f"model.layers.{layer}."
        for x in ("weight", "bias"):
            q, k, v = (weights[f"{at}self_attn.{n}_proj.{x}"] for n in "qkv")
            qkv = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
            assert torch.equal(tensors[f"decoder.layers.self_attention.linear_qkv.{x}"][layer], qkv)
        gate_up = torch.cat([weights[f"{at}mlp.{x}_proj.weight"] for x in ("gate", "up")])
        assert torch.equal(tensors["decoder.layers.mlp.linear_fc1.weight"][layer], gate_up)
        norm = weights[at + "post_attention_layernorm.weight"]
        assert torch.equal(tensors["decoder.layers.mlp.linear_fc1.layer_norm_weight"][layer], norm)
    padded = torch.cat([weights["lm_head.weight"], torch.zeros(126, 8)])
    assert torch.equal(tensors["output_layer.weight"], padded)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_experts_are_stacked_within_layers(family: str) -> None:
    spec = moe_spec(family)
    weights = random_weights(spec)
    stacked, numbered = dist_layout(spec), dist_layout(spec, per_layer=True)
    name = "mlp.experts.experts.linear_fc{}.weight"
    for layer in range(4):
        gates, ups, downs = zip(*(expert(spec, weights, layer, e) for e in range(8)), strict=True)
        both = torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
        for fc, wanted in ((1, both), (2, torch.stack(downs))):
            for layout, key in ((stacked, "decoder.layers."), (numbered, f"decoder.layers.{layer}.")):
                tensor = held(layout, weights)[key + name.format(fc)].view(
                    layout.stored[key + name.format(fc)]
                )
                assert torch.equal(tensor[layer] if layout is stacked else tensor, wanted)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize(
    "spec", [QWEN2, replace(QWEN2, tied=True), moe_spec("qwen3_moe"), moe_spec("mixtral")]
)
def test_every_canonical_tensor_comes_back(spec: ModelSpec, per_layer: bool) -> None:
    weights = random_weights(spec)
    written = dist_layout(spec, per_layer, vocab_rows=256)
    assert not layout_faults(written)
    optimizer = {"optimizer.state.exp_avg.output_layer.weight": (256, 8), "rng_state/shard_0_1": (1,)}
    layout, skipped = stored_layout(spec, written.stored | optimizer)
    assert layout == written
    assert not skipped
    [files] = executed(make_plan([layout], [hf_layout(spec)]), [held(layout, weights)])
    assert_same(files, weights)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"decoder.final_layernorm.weight": None}, "missing: decoder.final_layernorm.weight"),
        (
            {"decoder.layers.mlp.linear_fc1.layer_norm_weight": None},
            "missing: decoder.layers.mlp.linear_fc1.lay",
        ),
        ({"mtp.layers.0.eh_proj.weight": (8, 16)}, "not in this model: mtp.layers.0.eh_proj.weight"),
        (
            {"decoder.layers.mlp.linear_fc2.weight": (4, 8, 6)},
            r"of another shape: decoder.layers.mlp.linear_fc2.weight \(4, 8, 6\) instead of \(3, 8, 6\)",
        ),
        ({"embedding.word_embeddings.weight": (128, 8)}, "embedding.word_embeddings.weight"),  # 130 tokens
        ({"output_layer.weight": ()}, "output_layer.weight"),
    ],
)
def test_a_checkpoint_of_another_model(changes: dict[str, tuple[int, ...] | None], said: str) -> None:
    stored = dist_layout(QWEN2).stored | changes
    with pytest.raises(NamesDiffer, match=said):
        stored_layout(QWEN2, {key: shape for key, shape in stored.items() if shape is not None})


def test_names_that_may_differ() -> None:
    """A missing tensor may be named by its key or by the canonical tensors in it, an unknown one by its key."""
    stored = dict(dist_layout(QWEN2).stored)
    del stored["output_layer.weight"], stored["decoder.layers.self_attention.linear_qkv.bias"]
    stored["value_head.weight"] = (1, 8)
    allowed = ["lm_head.*", "decoder.*.bias", "value_head.*"]
    layout, skipped = stored_layout(QWEN2, stored, allowed)
    qkv = "decoder.layers.self_attention.linear_qkv.bias"
    biases = {f"model.layers.{i}.self_attn.{x}_proj.bias": qkv for i in range(QWEN2.layers) for x in "qkv"}
    assert skipped == biases | {
        "lm_head.weight": "output_layer.weight",
        "value_head.weight": "value_head.weight",
    }
    assert layout.shapes.keys() == stored.keys() - {"value_head.weight"}
    for one in allowed:
        with pytest.raises(NamesDiffer):
            stored_layout(QWEN2, stored, [x for x in allowed if x != one])


def test_norms_under_the_names_of_their_modules() -> None:
    stored = dict(dist_layout(QWEN2).stored)
    at = "decoder.layers."
    stored[at + "input_layernorm.weight"] = stored.pop(at + "self_attention.linear_qkv.layer_norm_weight")
    stored[at + "pre_mlp_layernorm.weight"] = stored.pop(at + "mlp.linear_fc1.layer_norm_weight")
    layout, _ = stored_layout(QWEN2, stored)
    weights = random_weights(QWEN2)
    norms = held(layout, weights)[at + "input_layernorm.weight"].view(3, 8)
    assert torch.equal(norms[2], weights["model.layers.2.input_layernorm.weight"])


@pytest.mark.parametrize(
    ("key", "is_model"),
    [
        ("decoder.layers.self_attention.linear_qkv._extra_state/shard_0_4", False),
        ("decoder.layers.0.mlp.linear_fc1._extra_state", False),
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", False),
        ("chained_0.optimizer.state.exp_avg.decoder.final_layernorm.weight", False),
        ("rng_state/shard_0.0_1.1", False),
        ("decoder.final_layernorm.weight", True),
        ("optimizers.weight", True),
    ],
)
def test_what_is_left_aside(key: str, is_model: bool) -> None:
    assert is_model_key(key) is is_model


def test_extra_states_have_one_key_a_layer_and_expert() -> None:
    keys = set(extra_state_keys(dist_layout(moe_spec()).stored))
    at = "decoder.layers."
    assert at + "mlp.experts.experts.linear_fc2._extra_state/shard_3.7_4.8" in keys
    assert at + "self_attention.core_attention._extra_state/shard_3_4" in keys
    assert "decoder.final_layernorm._extra_state/shard_0_1" in keys
    assert not any("router" in key or "embedding" in key or "output_layer" in key for key in keys)
    assert (
        sum("linear_fc1._extra_state" in key for key in keys) == 4 * 8 + 4
    )  # the norm is one of a dense linear_fc1
