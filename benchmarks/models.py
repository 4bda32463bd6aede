"""Shapes of real models, for benchmarks that need no weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.model import ModelSpec, Rope, read_model_spec
from grpo_mlm.layouts.spec import Moe

_QWEN3 = ModelSpec(
    family="qwen3",
    hidden_size=5120,
    layers=64,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn=25600,
    vocab_size=151936,
    tied=False,
    qkv_bias=False,
    o_bias=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope=Rope(1e6),
    max_position_embeddings=40960,
)
_LLAMA = replace(_QWEN3, family="llama", qk_norm=False, norm_eps=1e-5, rope=Rope(5e5), vocab_size=128256)
_QWEN3_MOE = replace(_QWEN3, family="qwen3_moe", kv_heads=4)

MODELS = {
    "qwen2.5-0.5b": replace(
        _QWEN3, family="qwen2", hidden_size=896, layers=24, heads=14, kv_heads=2, head_dim=64, ffn=4864, tied=True,
        qkv_bias=True, qk_norm=False,
    ),
    "qwen2.5-7b": replace(
        _QWEN3, family="qwen2", hidden_size=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab_size=152064,
        qkv_bias=True, qk_norm=False,
    ),
    "qwen3-0.6b": replace(_QWEN3, hidden_size=1024, layers=28, heads=16, ffn=3072, tied=True),
    "qwen3-32b": _QWEN3,
    "llama-3.3-70b": replace(_LLAMA, hidden_size=8192, layers=80, ffn=28672),
    "qwen3-30b-a3b": replace(
        _QWEN3_MOE, hidden_size=2048, layers=48, heads=32, ffn=6144, moe=Moe(128, 8, 768, True)
    ),
    "qwen3-235b-a22b": replace(
        _QWEN3_MOE, hidden_size=4096, layers=94, heads=64, ffn=12288, moe=Moe(128, 8, 1536, True)
    ),
}  # fmt: skip
"""By the name that people use; sizes from each model's config.json."""


def find_model(name: str) -> ModelSpec:
    """One of `MODELS`, or a folder with a config.json. UserError otherwise."""
    if name in MODELS:
        return MODELS[name]
    if (Path(name) / "config.json").is_file():
        return read_model_spec(name)
    raise UserError(f"model {name!r}: expected a folder with config.json, or one of {', '.join(MODELS)}")
