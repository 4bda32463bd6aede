"""Models, batches and configurations of the tests, and what Hugging Face transformers says about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.layouts.boxes import slices
from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts
from grpo_mlm.layouts.model import read_model_spec

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
SHAPE = {
    "vocab_size": 100,  # no multiple of 128: both engines' padding is in play
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, family: str, **fields: Any) -> PreTrainedModel:
    """Random weights from a fixed seed, wide enough that every part of a layer shows in the log-probs."""
    config_class, model_class = CLASSES[family]
    shape = SHAPE | fields
    if family in ("phi3", "qwen2"):
        del shape["head_dim"]
    model = model_class(config_class(**shape)).float().eval()
    make = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.1) if "norm" in name else (0.0, 0.1)
            parameter.copy_(mean + std * torch.randn(parameter.shape, generator=make))
    model.save_pretrained(folder)
    return model


def make_batch(lengths: Sequence[tuple[int, int]], seed: int = 0, **columns: Any) -> RolloutBatch:
    """Samples of (prompt, response) lengths with random tokens and advantages."""
    rng = np.random.default_rng(seed)
    prompts, responses = np.array(lengths).T
    n, r = len(lengths), int(responses.sum())
    return RolloutBatch(
        tokens=rng.integers(0, SHAPE["vocab_size"], int((prompts + responses).sum())),
        cu_seqlens=np.concatenate([[0], np.cumsum(prompts + responses)]),
        prompt_lens=prompts,
        group_id=np.zeros(n, dtype=np.int64),
        sample_index=np.arange(n),
        weight_version=np.zeros(n, dtype=np.int64),
        rollout_logprobs=np.zeros(r, dtype=np.float32),
        reward=np.zeros(n),
        valid=np.ones(n, dtype=bool),
        gen_seconds=np.zeros(n),
        reward_seconds=np.zeros(n),
        **{"advantages": rng.normal(size=r).astype(np.float32)} | columns,
    )


def make_config(
    folder: Path, actor: dict[str, Any] | None = None, temperature: float = 1.0, **sections: Any
) -> Config:
    actor = {"dtype": "float32"} | (actor or {})
    # Adam divides by the gradient's size: a large eps keeps rounding of near-zero gradients from showing.
    actor["optim"] = {"lr": 1e-3, "eps": 1e-4, "clip_grad": 0.5, "weight_decay": 0.1} | actor.get("optim", {})
    return Config.model_validate(
        {
            "model": {"path": str(folder)},
            "data": {"train_files": ["-"]},
            "reward": {"functions": [{"name": "exact_match"}]},
            "rollout": {"temperature": temperature},
            "actor": actor,
            "cluster": {"device": "cpu"},
        }
        | sections
    )


def make_world(tp: int = 1, pp: int = 1, dp: int = 1) -> World:
    return World(tp, pp, dp, rollout_tp=1, num_engines=0, devices=tp * pp * dp)


def hf_logprobs(
    model: PreTrainedModel, batch: RolloutBatch, temperature: float = 1.0, known: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of all response tokens, sample by sample, `[R]`, over the first `known` ids."""
    logprobs, entropies = [], []
    for i, prompt in enumerate(batch.prompt_lens):
        ids = torch.from_numpy(batch.sample_tokens(i))
        logp = torch.log_softmax(
            model(ids[None]).logits[0, prompt - 1 : -1, :known].double() / temperature, -1
        )
        logprobs.append(logp.gather(1, ids[prompt:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def in_order(batch: RolloutBatch, replies: list[dict[str, Any] | None], column: str) -> np.ndarray:
    """The replicas' values in the batch's order, `[R]`; every response token exactly once."""
    offsets, values = batch.cu_responses, np.full(len(batch.rollout_logprobs), np.nan)
    for reply in replies:
        if reply is None or column not in reply:
            continue
        pieces = np.split(reply[column], np.cumsum(batch.response_lens[reply["indices"]])[:-1])
        for i, piece in zip(reply["indices"], pieces, strict=True):
            assert np.isnan(values[offsets[i] : offsets[i + 1]]).all()
            values[offsets[i] : offsets[i + 1]] = piece
    return values


def whole(folder: Path, world: World, ranks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Canonical tensors from the ranks' local ones; copies of the same element must be the same bits."""
    layouts = megatron_layouts(read_model_spec(folder), MegatronParallel(world.tp, world.pp), world.dp)
    tensors: dict[str, np.ndarray] = {}
    extents: dict[str, list[int]] = {}
    for layout in layouts:
        for piece in layout.pieces:
            ends = [stop for _, stop in piece.box]
            extents[piece.tensor] = [
                max(a, b) for a, b in zip(ends, extents.get(piece.tensor, ends), strict=True)
            ]
    for layout, local in zip(layouts, ranks, strict=True):
        assert local.keys() == layout.shapes.keys()
        for piece in layout.pieces:
            target = tensors.setdefault(
                piece.tensor, np.full(extents[piece.tensor], np.nan, dtype=np.float32)
            )
            values, there = local[piece.local][slices(piece.local_box)], target[slices(piece.box)]
            assert np.isnan(there).all() or np.array_equal(there, values), f"copies of {piece.tensor} differ"
            target[slices(piece.box)] = values
    return tensors
