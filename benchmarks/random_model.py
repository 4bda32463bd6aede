"""A Hugging Face folder of random weights of some model's shape, for benchmarks that read files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from grpo_mlm.bridge.durable import NewFile
from grpo_mlm.bridge.hf_index import pack_files, write_index
from grpo_mlm.bridge.safetensors_stream import Plain, SafetensorsWriter
from grpo_mlm.layouts.model import ModelSpec, canonical_tensors

MAX_FILE_BYTES = 5 << 30


def make_folder(spec: ModelSpec, folder: Path) -> int:
    """Write it; returns the bytes of all its files."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(spec), indent=2))
    tensors = {name: Plain(torch.bfloat16, shape) for name, shape in canonical_tensors(spec).items()}
    generator = torch.Generator().manual_seed(0)
    files = pack_files(tensors, MAX_FILE_BYTES)
    for file, inside in files.items():
        with NewFile(folder / file) as stream:
            writer = SafetensorsWriter(stream, inside)
            for tensor in inside.values():
                writer.write(
                    torch.empty(tensor.shape, dtype=tensor.dtype).normal_(std=0.02, generator=generator)
                )
            writer.close()
    write_index(folder, files)
    return sum(path.stat().st_size for path in folder.iterdir())


def _config(spec: ModelSpec) -> dict[str, Any]:
    config = {
        "model_type": spec.family,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocab_size,
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.max_position_embeddings,
    }
    if spec.moe:
        config |= {
            "num_experts": spec.moe.experts,
            "num_experts_per_tok": spec.moe.top_k,
            "moe_intermediate_size": spec.moe.ffn,
            "norm_topk_prob": spec.moe.norm_topk_prob,
        }
    return config
