"""Tiny models of every family, by transformers, and what is in their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "rms_norm_eps": 1e-2,  # far from any default: where it is lost, the logits show it (CNV-07)
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"attention_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "phi3": (Phi3Config, {"bos_token_id": 1, "eos_token_id": 2}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 2}),
}


def make_model(folder: Path, family: str, max_shard_size: str = "5GB", **changes: Any) -> Path:
    """A model folder with random weights, norms and biases included, and files of every sort beside them."""
    kind, own = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(kind(**(SIZES | own | changes)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * (0.2 if parameter.dim() > 1 else 1.0))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_text('{"odd  spacing":1}')
    (folder / "chat_template.jinja").write_bytes(b"{{ x }}\r\n")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of every file, whatever the index says."""
    out: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out |= load_file(path)
    return out


def assert_same_weights(out: Path, source: Path) -> None:
    """The same names, the same dtypes, the same bits."""
    got, wanted = tensors_of(out), tensors_of(source)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def logits(folder: Path) -> Tensor:
    """What transformers computes with the folder, in fp32."""
    AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(12).view(1, -1)).logits


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder, by its relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def manifest(folder: Path) -> dict[str, Any]:
    [path] = [*folder.glob("manifest.json"), *folder.glob("conversion_manifest.json")]
    return json.loads(path.read_text())


class Told:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.total = self.done = 0

    def start(self, total: int, done: int) -> None:
        self.total, self.done = total, done

    def advance(self, n: int) -> None:
        self.done += n

    def say(self, text: str) -> None:
        self.lines.append(text)
