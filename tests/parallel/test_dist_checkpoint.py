"""Distributed checkpoints: what we write, stock megatron-core loads; what stock megatron-core saves, we read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_mlm.bridge.dist_store import DistStore
from grpo_mlm.layouts.megatron import MegatronParallel
from grpo_mlm.layouts.model import ModelSpec, read_model_spec
from tests.bridge.dist_checkpoint import assert_equal, hub_tensors, read_checkpoint, write_checkpoint
from tests.parallel import stock_model

pytestmark = pytest.mark.slow

SIZES = {
    "vocab_size": 100,  # pads to 128, with tensor parallelism to 256
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "vocab_size": 256},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True, "vocab_size": 256},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1},
    "qwen3_moe": {"model_type": "qwen3_moe", "norm_topk_prob": True} | EXPERTS,
    "mixtral tied": {"model_type": "mixtral", "tie_word_embeddings": True, "sliding_window": None} | EXPERTS,
}
DENSE = [MegatronParallel(tp, pp) for tp in (1, 2) for pp in (1, 2)]
MOE = [
    MegatronParallel(tp=2),
    MegatronParallel(pp=2, ep=2),
    MegatronParallel(tp=2, ep=2, etp=1),
    MegatronParallel(tp=2, ep=2, etp=2),
    MegatronParallel(tp=2, pp=2, ep=2, etp=1),
]
SAVED = [
    MegatronParallel(tp=2, pp=2),
    MegatronParallel(pp=2, vpp=2),
    MegatronParallel(tp=2, pp=2, first_stage_layers=1),
]
SAVED_MOE = [
    MegatronParallel(tp=2, pp=2, ep=2, etp=1),
    MegatronParallel(pp=2, ep=2, vpp=2),
    MegatronParallel(tp=2, ep=2, etp=2),
]
