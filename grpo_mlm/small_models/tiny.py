"""Tiny random models, made on first use: the whole road without a download.

`model.maker: grpo_mlm.small_models.tiny:make_qwen3` in a config makes one where `model.path` says.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_mlm.small_models.aside import is_made, made_aside

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN)
CHARACTERS = string.digits + string.ascii_letters + " +-*/=?!.,:;'\"()<>\n"
VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<{{ message['role'] }}>{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# head_dim 32 is the least that vLLM's CPU attention takes; 4 layers and 2 KV heads cut by TP 2 and PP 2.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": SPECIAL.index(BOS),
    "eos_token_id": SPECIAL.index(EOS),
    "pad_token_id": SPECIAL.index(PAD),
    # The usual 0.02 gives nearly flat logits at this width: errors in a layer would not show in them.
    "initializer_range": 0.15,
    "dtype": "float32",
}


def make_qwen3(folder: Path) -> None:
    """Qwen3: q/k norms, tied embeddings."""
    _make(folder, Qwen3ForCausalLM, Qwen3Config(**SHAPE, tie_word_embeddings=True))


def make_llama(folder: Path) -> None:
    """Llama: an output head of its own."""
    _make(folder, LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False))


def make_qwen2(folder: Path) -> None:
    """Qwen2: q/k/v biases, an output head of its own. Its head size is always hidden size / heads."""
    shape = SHAPE | {"hidden_size": SHAPE["num_attention_heads"] * SHAPE["head_dim"]}
    del shape["head_dim"]
    _make(folder, Qwen2ForCausalLM, Qwen2Config(**shape, tie_word_embeddings=False))


def _make(folder: Path, model_class: type[PreTrainedModel], config: Any) -> None:
    """Write a Hugging Face folder with random weights from a fixed seed, biases and norms included."""
    folder = Path(folder)
    if is_made(folder):
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Stock init leaves biases 0 and norms 1: a mistake in placing them would not show.
                if name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.7, 1.3)
            # Stock init zeroes the padding row. A model of random weights samples that token too, and the norm
            # of a zero vector has a gradient of 1 / sqrt(eps).
            embedding: Any = model.get_input_embeddings()
            embedding.weight[config.pad_token_id].normal_(0.0, config.initializer_range)
    with made_aside(folder) as aside:
        model.save_pretrained(aside)
        character_tokenizer().save_pretrained(aside)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; encoding adds no special tokens, the chat template puts BOS in front."""
    # Byte-level BPE without merges, because transformers turns every Qwen2 tokenizer into that kind.
    spelled = [pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(c)[0][0] for c in CHARACTERS]
    vocab = {token: i for i, token in enumerate((*SPECIAL, *spelled))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )
