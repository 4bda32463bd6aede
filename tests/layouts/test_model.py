"""Reading config.json, against transformers' own reading of it, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}


def folder(tmp_path: Path, **config: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **config}))
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: LlamaConfig(**kw),
        lambda **kw: LlamaConfig(attention_bias=True, head_dim=32, **kw),
        lambda **kw: Qwen2Config(**kw),
        lambda **kw: MistralConfig(sliding_window=None, **kw),
        lambda **kw: Phi3Config(pad_token_id=0, **kw),
        lambda **kw: Qwen3Config(head_dim=32, rms_norm_eps=1e-2, **kw),
        lambda **kw: Qwen3Config(
            rope_parameters={"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, **kw
        ),
    ],
)
def test_canonical_tensors_are_those_of_the_transformers_model(tmp_path: Path, make: Any, tied: bool) -> None:
    config = make(tie_word_embeddings=tied, **SIZES)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(p.shape) for name, p in model.named_parameters()}  # a tied head is listed once
    spec = read_model_spec(tmp_path)
    assert canonical_tensors(spec) == theirs
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.rope.theta == config.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("config", "norm"),
    [
        (Qwen3MoeConfig(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32, **SIZES), False),
        (
            Qwen3MoeConfig(
                num_experts=3, norm_topk_prob=True, num_experts_per_tok=1, **(SIZES | {"head_dim": 32})
            ),
            True,
        ),
        (MixtralConfig(num_local_experts=3, **SIZES), True),
    ],
)
def test_experts_are_named_as_transformers_saves_them(tmp_path: Path, config: Any, norm: bool) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        theirs = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    spec = read_model_spec(tmp_path)
    assert canonical_tensors(spec) == theirs
    assert spec.moe is not None
    assert (spec.moe.experts, spec.moe.top_k, spec.moe.norm_topk_prob) == (
        3,
        config.num_experts_per_tok,
        norm,
    )


@pytest.mark.parametrize(
    "fields", [{"model_type": "mistral"}, {"model_type": "mixtral", "sliding_window": 4096}]
)
def test_attention_windows_are_refused(tmp_path: Path, fields: dict) -> None:
    """A config of Mistral that does not say so means a window of 4096."""
    with pytest.raises(UserError, match="sliding_window"):
        read_model_spec(folder(tmp_path, **fields))


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "phi3": {"pad_token_id": 0},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields_mean_what_transformers_takes_them_to_be(tmp_path: Path, family: str) -> None:
    path = folder(tmp_path, model_type=family, **FAMILIES[family])
    config, spec = AutoConfig.from_pretrained(path), read_model_spec(path)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 64 // 4)
    assert (spec.tied, spec.norm_eps) == (config.tie_word_embeddings, config.rms_norm_eps)
    assert spec.rope.theta == config.rope_parameters["rope_theta"]


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"rope_theta": 1e6}, None),
        ({"rope_theta": 1000000}, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, None),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 8}},
            {"rope_type": "linear", "factor": 8.0},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", **LLAMA3},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", **LLAMA3}},
            {"rope_type": "llama3", **LLAMA3},
        ),
    ],
)
def test_rope_is_read_from_both_generations_of_configs(tmp_path: Path, fields: dict, scaling: Any) -> None:
    """CNV-06: base and scaling carried, in the form of transformers 5 and in the older one."""
    rope = read_model_spec(folder(tmp_path, **fields)).rope
    assert (rope.theta, rope.scaling) == (1e6, scaling)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        ({"layer_types": 2}, "layer_types is 2"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; known: dots1, llama, mistral,"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict, named: str) -> None:
    with pytest.raises(UserError) as error:
        read_model_spec(folder(tmp_path, **fields))
    assert named in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """CNV-10: an adapter's weights must not be dropped silently."""
    (folder(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="adapter"):
        read_model_spec(tmp_path)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model_spec(tmp_path)
