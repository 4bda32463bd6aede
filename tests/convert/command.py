"""Runs `grpo-mlm convert` in this process, on models that are made of a config and random numbers."""

import contextlib
import io
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

from grpo_mlm import cli
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "float32",
}
LLAMA = QWEN3 | {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "tie_word_embeddings": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
FILE = "model.safetensors"


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)


def convert(*args: object) -> Ended:
    """`grpo-mlm convert ARGS`, by the same `main` as on the command line."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handler = signal.getsignal(signal.SIGTERM)
    argv = ["grpo-mlm", "convert", *map(str, args)]
    try:
        with (
            mock.patch.object(sys, "argv", argv),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            cli.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return Ended(code, out.getvalue(), err.getvalue())


def make_model(
    folder: Path, config: dict[str, Any] = QWEN3, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """A Hugging Face folder with one file of random weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    shapes = canonical_tensors(read_model_spec(folder))
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / FILE)
    return folder


def edited(folder: Path, out: Path, **changes: Any) -> Path:
    """A copy of a model whose tensors `edit` has changed, and whose config has these values instead."""
    edit = changes.pop("edit", lambda tensors: None)
    out.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file(tensors, out / FILE)
    return out
