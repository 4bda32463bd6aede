"""Small tokenizers, built here: one token a character, and bytes with a merge."""

from __future__ import annotations

import string

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS, UNKNOWN = SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + string.ascii_letters + " +-*/=?!.,:;<>|_\n"
VOCAB = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}

TURNS = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + TURNS
INDIRECT_BOS = "{% set first = '<b' ~ 'os>' %}{{ first }}" + TURNS
"""No literal beginning-of-sequence token in the template's text."""


def characters(template: str | None = WITH_BOS, encoding_adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token a character; encoding puts BOS in front where `encoding_adds_bos`."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _finish(tokenizer, template, encoding_adds_bos)


def merged_bytes(template: str | None = WITH_BOS) -> PreTrainedTokenizerFast:
    """One token a UTF-8 byte, but `ab` is one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet, "ab"))}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[("a", "b")], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, template, False)


def _finish(tokenizer: Tokenizer, template: str | None, encoding_adds_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    if encoding_adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, VOCAB[BOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=UNKNOWN,
        chat_template=template,
    )


def spell(text: str, bos: bool = True) -> tuple[int, ...]:
    """The ids of a text by the table, BOS in front."""
    return (*([VOCAB[BOS]] if bos else []), *(VOCAB[c] for c in text))
