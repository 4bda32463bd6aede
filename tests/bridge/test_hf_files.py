"""Loading one rank's tensors from Hugging Face files, and every way in which files can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from grpo_mlm.bridge.hf_files import check_headers, hub_folder, load_layout
from grpo_mlm.bridge.hf_index import tensor_files
from grpo_mlm.errors import RunFailure, UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import read_model_spec

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 70,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(tie_word_embeddings=True, **SIZES),
    "qwen2": Qwen2Config(tie_word_embeddings=False, **SIZES),
    "qwen3": Qwen3Config(tie_word_embeddings=False, head_dim=32, **SIZES),
}


def make_model(folder: Path, family: str, max_shard_size: str = "5GB") -> dict[str, torch.Tensor]:
    """Write a tiny random model with non-trivial norms and biases; its tensors."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return {name: p.detach() for name, p in model.named_parameters()}


def empty(layout: Layout, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in layout.shapes.items()}


@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_load_their_slices(tmp_path: Path, family: str, max_shard_size: str) -> None:
    full = make_model(tmp_path, family, max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "50KB")
    spec = read_model_spec(tmp_path)
    ranks = []
    for layout in megatron_layouts(spec, MegatronParallel(tp=2, pp=2), dp=1):
        ranks.append(empty(layout))
        load_layout(tmp_path, layout, ranks[-1])
    # Independent slicing of a few of each kind; rank = 2 * stage + tensor-parallel rank.
    one = "model.layers.1."
    q, k, v = (full[f"{one}self_attn.{x}_proj.weight"].chunk(2)[1] for x in "qkv")
    assert torch.equal(ranks[3]["decoder.layers.0.self_attention.linear_qkv.weight"], torch.cat([q, k, v]))
    down = full[one + "mlp.down_proj.weight"][:, 48:]
    assert torch.equal(ranks[3]["decoder.layers.0.mlp.linear_fc2.weight"], down)
    table = full["model.embed_tokens.weight"]
    assert torch.equal(ranks[0]["embedding.word_embeddings.weight"][:70], table)
    head = full.get("lm_head.weight", table)
    assert torch.equal(ranks[2]["output_layer.weight"][:70], head)
    for rank, name in ((0, "embedding.word_embeddings.weight"), (2, "output_layer.weight")):
        assert torch.equal(ranks[rank][name][70:], torch.zeros(58, 64))
        assert torch.equal(ranks[rank + 1][name], torch.zeros(128, 64))
    assert not any(p.isnan().any() for rank in ranks for p in rank.values())


def test_values_are_cast_to_the_dtype_of_the_parameters(tmp_path: Path) -> None:
    full = make_model(tmp_path, "qwen3")
    [layout] = megatron_layouts(read_model_spec(tmp_path), MegatronParallel(), dp=1)
    params = empty(layout, torch.bfloat16)
    load_layout(tmp_path, layout, params)
    assert torch.equal(params["decoder.final_layernorm.weight"], full["model.norm.weight"].bfloat16())


def test_a_tied_model_may_carry_its_head_and_rotary_tables(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    rewrite(tmp_path, lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    [layout] = megatron_layouts(read_model_spec(tmp_path), MegatronParallel(), dp=1)
    load_layout(tmp_path, layout, empty(layout))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


NORM = "model.layers.1.input_layernorm.weight"
UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: {k: v for k, v in t.items() if k != NORM}, f"missing: {NORM}"),
        (lambda t: {**t, "model.extra.weight": torch.ones(1)}, "not in this model: model.extra.weight"),
        (
            lambda t: {("x." + k if k == UP else k): v for k, v in t.items()},
            f"missing: {UP}; not in this model: x.{UP}",
        ),
        (lambda t: {**t, UP: t[UP][:-1]}, f"{UP} has shape (95, 64), config.json means (96, 64)"),
        (lambda t: {**t, UP: t[UP].to(torch.int8)}, f"{UP} is stored as I8"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_named(tmp_path: Path, change: Callable, named: str) -> None:
    make_model(tmp_path, "llama")
    rewrite(tmp_path, change)
    [layout] = megatron_layouts(read_model_spec(tmp_path), MegatronParallel(), dp=1)
    with pytest.raises(UserError) as error:
        load_layout(tmp_path, layout, empty(layout))
    assert named in str(error.value)


def test_damaged_or_incomplete_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="only safetensors weights can be read"):
        tensor_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(UserError, match=r"model\.safetensors is not a readable safetensors file"):
        tensor_files(tmp_path)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", "50KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    [layout] = megatron_layouts(read_model_spec(tmp_path), MegatronParallel(), dp=1)
    path.write_text(json.dumps({"weight_map": {**files, NORM: "model-9.safetensors"}}))
    with pytest.raises(UserError, match=r"files that are not there: model-9\.safetensors"):
        load_layout(tmp_path, layout, empty(layout))
    other = next(file for file in sorted(set(files.values())) if file != files[NORM])
    path.write_text(json.dumps({"weight_map": {**files, NORM: other}}))
    with pytest.raises(UserError, match=f"{other}: has no tensor {NORM}"):
        load_layout(tmp_path, layout, empty(layout))
    path.write_text("[]")
    with pytest.raises(UserError, match="not a valid safetensors index"):
        load_layout(tmp_path, layout, empty(layout))


def test_a_model_that_is_not_its_layout_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    [layout] = megatron_layouts(read_model_spec(tmp_path), MegatronParallel(), dp=1)
    params = empty(layout)
    with pytest.raises(RunFailure, match=r"different tensors: extra\.bias"):
        load_layout(tmp_path, layout, {**params, "extra.bias": torch.zeros(1)})
    with pytest.raises(RunFailure, match=r"decoder\.final_layernorm\.weight has shape \(65,\)"):
        load_layout(tmp_path, layout, {**params, "decoder.final_layernorm.weight": torch.zeros(65)})


def test_model_paths_that_lead_nowhere_are_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub_folder(tmp_path) == tmp_path
    with pytest.raises(UserError, match="does not exist"):
        hub_folder(tmp_path / "no-model")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        hub_folder(tmp_path / "file")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no-one/no-model.*the hub did not give it"):
        hub_folder("no-one/no-model")


def test_a_shard_that_is_cut_short_is_named_before_the_run(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3", "50KB")
    spec = read_model_spec(tmp_path)
    check_headers(tmp_path, spec)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match=shard.name):
        check_headers(tmp_path, spec)
