"""Rows by hand, and what is sent for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from grpo_mlm.config.schema import DataConfig
from grpo_mlm.data.prompts import PromptSet, load_prompts
from tests.data.tokens import VOCAB, characters

TURNS = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    tmp_path: Path,
    rows: Sequence[dict[str, Any]],
    tokenizer: PreTrainedTokenizerFast | None = None,
    **data: Any,
) -> PromptSet:
    spec = write(tmp_path / "rows.jsonl", rows)
    return load_prompts([spec], DataConfig(train_files=[spec], **data), tokenizer or characters(TURNS))


def text_of(ids: Sequence[int]) -> str:
    """The text of ids by hand, from the vocabulary."""
    return "".join(list(VOCAB)[i] for i in ids)


def sent(found: PromptSet) -> list[str]:
    """What is sent, by the ids alone."""
    return [text_of(prompt.token_ids) for prompt in found.prompts]
