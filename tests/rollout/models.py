"""Tiny models, the configuration that samples from them, and what Hugging Face transformers says about a sample."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_mlm.config.schema import Config
from grpo_mlm.small_models.tiny import SHAPE, VOCAB_SIZE, character_tokenizer

PROMPTS = ("1+2=", "34+5=", "abc", "7*8-1=", "what is 9/3?", "x", "(1+2)*(3+4)=?", "the quick brown fox")

# Two key-value heads, so that they are replicated at TP 4; a vocabulary that pads to 128, so that a rank of four
# has only padding.
_SMALL = SHAPE | {"vocab_size": 70, "hidden_size": 128, "num_hidden_layers": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama_unpadded": {"model_type": "llama", "vocab_size": 256},
    "qwen2": {"model_type": "qwen2"},
    "qwen2_tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "phi3": {"model_type": "phi3", "sliding_window": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4} | _EXPERTS,
    "qwen3_moe_uneven": {"model_type": "qwen3_moe", "num_experts": 6} | _EXPERTS,
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
}
"""By a name for tests: what the config.json of a model has besides the sizes that all share."""


def write_config(name: str, folder: Path, **changes: Any) -> Path:
    """A folder with nothing but the config.json of a model of `CONFIGS`, its class named in it."""
    config = AutoConfig.for_model(**(_SMALL | {"tie_word_embeddings": False} | CONFIGS[name] | changes))
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    return folder


def make_model(name: str, folder: Path) -> Path:
    """A model of `CONFIGS` with random weights, and the character tokenizer, whose every token it knows."""
    write_config(name, folder, vocab_size=VOCAB_SIZE)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def make_config(folder: Path, **sections: dict[str, Any]) -> Config:
    """A small fp32 engine of this model; `sections` override."""
    values: dict[str, dict[str, Any]] = {
        "cluster": {"device": "cpu", "call_timeout_s": 60.0},
        "model": {"path": str(folder)},
        "data": {"train_files": ["unused"], "max_prompt_length": 96, "max_response_length": 48},
        "actor": {"dtype": "float32"},
        "rollout": {"max_num_seqs": 64, "kv_cache_gb": 0.1},
        "reward": {"functions": [{"name": "exact_match"}]},
        "bridge": {"bucket_mb": 1},
    }
    for name, fields in sections.items():
        values[name] = values.get(name, {}) | fields
    return Config.model_validate(values)


def variant(source: Path, folder: Path, seed: int) -> Path:
    """The same model with every weight moved by noise."""
    shutil.copytree(source, folder)
    model = load(source)
    make = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=make))
    model.save_pretrained(folder)
    return folder


def rewrite_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, made if it is not there."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def encode(folder: Path, text: str) -> tuple[int, ...]:
    return tuple(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


@torch.no_grad()
def reference(
    model: PreTrainedModel,
    prompt: Sequence[int],
    ids: Sequence[int],
    temperature: float = 1.0,
    known: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probs of sampled ids and the greedy id at each of their positions, by transformers in fp32.

    `known`: ids from there on cannot be sampled; 0 allows all.
    """
    logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1].float()
    if known:
        logits[:, known:] = -torch.inf
    table = torch.log_softmax(logits / temperature, -1)
    picked = table.gather(1, torch.tensor([list(ids)]).T).squeeze(1)
    return picked, logits.argmax(-1)
