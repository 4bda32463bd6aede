"""dots.llm1: dense layers before the mixtures, a shared MLP beside the experts, and a bias that stays float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, Dots1Config

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.megatron import LOCAL, TE, MegatronParallel, megatron_layouts
from grpo_mlm.layouts.megatron_dist import dist_layout, stored_layout
from grpo_mlm.layouts.model import canonical_tensors, float32_tensors, read_model_spec
from grpo_mlm.layouts.planner import make_plan
from grpo_mlm.layouts.spec import Moe
from grpo_mlm.layouts.vllm import vllm_layout
from tests.layouts.test_experts import moe_spec
from tests.layouts.test_model import SIZES as MODEL_SIZES
from tests.layouts.test_views import Tensors, assert_same, executed, held, random_weights

SIZES: dict[str, Any] = MODEL_SIZES | {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
}
MOE = Moe(8, 2, 12, True, shared_ffn=16, dense_layers=2, expert_bias=True)
SPEC = replace(moe_spec(), family="dots1", moe=MOE)  # 4 layers, MLPs of width 20
ROUTER, EXPERTS = "mlp.gate.", "mlp.experts."


def folder(tmp_path: Path, **changes: Any) -> Path:
    config = {"model_type": "dots1", **SIZES, **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_tensors_and_their_precision_are_what_transformers_saves_of_a_bf16_model(tmp_path: Path) -> None:
    """The file of a bf16 model holds the biases in float32, and nothing else."""
    config = Dots1Config(first_k_dense_replace=1, norm_topk_prob=True, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert canonical_tensors(spec) == {name: tuple(t.get_shape()) for name, t in stored.items()}
        assert float32_tensors(spec) == {name for name, t in stored.items() if t.get_dtype() == "F32"}
    assert spec.moe == Moe(4, 2, 32, True, shared_ffn=64, dense_layers=1, expert_bias=True)


def test_absent_fields_mean_what_transformers_takes_them_to_be(tmp_path: Path) -> None:
    spec = read_model_spec(folder(tmp_path))
    config = AutoConfig.from_pretrained(tmp_path)
    assert spec.moe is not None
    assert (spec.moe.dense_layers, spec.moe.norm_topk_prob) == (
        config.first_k_dense_replace,
        config.norm_topk_prob,
    )
    assert (spec.norm_eps, spec.rope.theta) == (config.rms_norm_eps, config.rope_parameters["rope_theta"])
    assert set(config.layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n_shared_experts": None}, "n_shared_experts is None, expected a positive whole number"),
        ({"n_routed_experts": None}, "n_routed_experts is None"),
        ({"n_routed_experts": 1}, "num_experts_per_tok 2 is more than n_routed_experts 1"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1, expected a whole number of at least 0"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"max_window_layers": 1}, "layers from 1 on (max_window_layers) have an attention window"),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "sliding_attention"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict, named: str) -> None:
    with pytest.raises(UserError) as error:
        read_model_spec(folder(tmp_path, **fields))
    assert named in str(error.value)


@pytest.mark.parametrize(
    "fields", [{"sliding_window": None}, {"layer_types": ["full_attention"] * 3}, {"max_window_layers": 3}]
)
def test_layers_without_attention_windows_are_taken(tmp_path: Path, fields: dict) -> None:
    path = folder(tmp_path, **{"max_window_layers": 0, "sliding_window": 64} | fields)
    assert set(AutoConfig.from_pretrained(path).layer_types) == {"full_attention"}
    read_model_spec(path)


def test_only_the_routers_biases_stay_float32() -> None:
    assert float32_tensors(SPEC) == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (2, 3)}
    assert float32_tensors(moe_spec()) == frozenset()


def gated(weights: Tensors, at: str, tp: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[gate; up] and down of one tensor rank."""
    gate, up = (weights[f"{at}{x}_proj.weight"].chunk(tp, 0)[rank] for x in ("gate", "up"))
    return torch.cat([gate, up]), weights[at + "down_proj.weight"].chunk(tp, 1)[rank]


def megatron_mlp(weights: Tensors, layer: int, par: MegatronParallel, t: int, e: int, et: int) -> Tensors:
    """What a rank has below `mlp.` in a layer of the whole model, cut by plain torch."""
    at = f"model.layers.{layer}.mlp."
    if layer < MOE.dense_layers:
        fc1, fc2 = gated(weights, at, par.tp, t)
        return {"linear_fc1.weight": fc1, "linear_fc2.weight": fc2}
    fc1, fc2 = gated(weights, at + "shared_experts.", par.tp, t)
    out = {
        "router.weight": weights[at + "gate.weight"],
        "router.expert_bias": weights[at + "gate.e_score_correction_bias"],
        "shared_experts.linear_fc1.weight": fc1,
        "shared_experts.linear_fc2.weight": fc2,
    }
    each = MOE.experts // par.ep
    for i in range(each):
        fc1, fc2 = gated(weights, f"{at}experts.{e * each + i}.", par.expert_tp, et)
        out |= {f"experts.local_experts.{i}.linear_fc{n}.weight": x for n, x in ((1, fc1), (2, fc2))}
    return out


RANKS = [
    (MegatronParallel(), 1),
    (MegatronParallel(tp=2, ep=4, etp=1), 2),
    (MegatronParallel(tp=4, pp=2, ep=2, etp=2), 1),
    (MegatronParallel(tp=2, pp=2, ep=4), 4),
    (MegatronParallel(pp=2, first_stage_layers=1), 1),
]


@pytest.mark.parametrize(("par", "dp"), RANKS)
def test_a_trainer_rank_holds_what_plain_slicing_gives(par: MegatronParallel, dp: int) -> None:
    """The shared MLP is cut by the ordinary tensor ranks, whatever those of the experts are; the bias is whole."""
    weights, block = random_weights(SPEC), par.tp * dp
    for rank, layout in enumerate(megatron_layouts(SPEC, par, dp)):
        stage, i = divmod(rank, block)
        t, e, et = i % par.tp, i // par.expert_tp % par.ep, i % par.expert_tp
        first = par.first_stage_layers or 4 // par.pp
        layers = range(4)[:first] if stage == 0 else range(4)[first:]
        wanted = {
            f"decoder.layers.{local}.mlp.{name}": tensor
            for local, layer in enumerate(layers)
            for name, tensor in megatron_mlp(weights, layer, par, t, e, et).items()
        }
        tensors = held(layout, weights)
        assert_same({name: x for name, x in tensors.items() if ".mlp." in name}, wanted)


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_engine_rank_holds_what_plain_slicing_gives(tp: int, ep: bool) -> None:
    """With whole experts dealt out, the shared MLP is still cut by tensor ranks."""
    weights = random_weights(SPEC)
    for t in range(tp):
        tensors = held(vllm_layout(SPEC, tp, t, ep), weights)
        for layer in range(4):
            at = f"model.layers.{layer}.mlp."
            if layer < MOE.dense_layers:
                gate_up, down = gated(weights, at, tp, t)
                wanted = {"gate_up_proj.weight": gate_up, "down_proj.weight": down}
            else:
                gate_up, down = gated(weights, at + "shared_experts.", tp, t)
                shared = "experts._shared_experts._layer.shared_experts."
                mine = range(8 // tp * t, 8 // tp * (t + 1)) if ep else range(8)
                cut = (1, 0) if ep else (tp, t)
                routed = [gated(weights, f"{at}experts.{e}.", *cut) for e in mine]
                wanted = {
                    "experts.gate.weight": weights[at + "gate.weight"],
                    "experts.gate.e_score_correction_bias": weights[at + "gate.e_score_correction_bias"],
                    shared + "gate_up_proj.weight": gate_up,
                    shared + "down_proj.weight": down,
                    "experts.routed_experts.w13_weight": torch.cat([fc1 for fc1, _ in routed]),
                    "experts.routed_experts.w2_weight": torch.cat([fc2 for _, fc2 in routed]),
                }
            found = {name.removeprefix(at): x for name, x in tensors.items() if name.startswith(at)}
            assert_same(found, wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("par", "dp"), [*RANKS, (MegatronParallel(tp=2, pp=2, vpp=2, ep=2), 2)])
def test_every_tensor_comes_back_from_every_cut(par: MegatronParallel, dp: int, tied: bool) -> None:
    """CNV-01, CNV-03: bit for bit, none missing and none extra."""
    spec = replace(SPEC, tied=tied)
    weights, ranks = random_weights(spec), megatron_layouts(spec, par, dp)
    trained = executed(make_plan([hf_layout(spec)], ranks), [weights])
    [files] = executed(make_plan(ranks, [hf_layout(spec)]), trained)
    assert_same(files, weights)
    engine = [vllm_layout(spec, 2, t, ep=True) for t in range(2)]
    for layout, tensors in zip(engine, executed(make_plan(ranks, engine), trained), strict=True):
        assert_same(tensors, held(layout, weights))


def test_a_distributed_checkpoint_numbers_layers_of_different_kinds() -> None:
    """As megatron-core does where `moe_layer_freq` is a list; the bias is a tensor like any other."""
    layout, weights = dist_layout(SPEC), random_weights(SPEC)
    assert layout.stored["decoder.layers.2.mlp.router.expert_bias"] == (8,)
    assert layout.stored["decoder.layers.2.mlp.shared_experts.linear_fc1.weight"] == (2 * 16, 8)
    assert layout.stored["decoder.layers.1.mlp.linear_fc1.weight"] == (2 * 20, 8)
    read, _ = stored_layout(SPEC, layout.stored)
    [files] = executed(make_plan([read], [hf_layout(SPEC)]), [held(layout, weights)])
    assert_same(files, weights)


def test_transformer_engine_fuses_the_norm_before_an_mlp_but_not_before_a_router() -> None:
    local, te = (
        set(megatron_layouts(SPEC, MegatronParallel(), 1, naming)[0].shapes) for naming in (LOCAL, TE)
    )
    expected = {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight"}
    expected |= {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight"}
    expected |= {f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight" for n in range(4)}
    for layer, n, e in ((layer, n, e) for layer in (2, 3) for n in (1, 2) for e in range(8)):
        expected.add(f"decoder.layers.{layer}.mlp.experts.linear_fc{n}.weight{e}")
    assert te - local == expected
