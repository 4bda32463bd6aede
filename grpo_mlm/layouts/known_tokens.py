"""How many ids can be sampled: models often have more embedding rows than the tokenizer has tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.model import read_model_spec


def known_tokens(folder: Path) -> int:
    """Ids from here on cannot be decoded: engines never sample them, and they enter no softmax of the trainer.

    Read from tokenizer.json alone, so that both sides find the same number; all of the model's rows where there
    is none. UserError: config.json or tokenizer.json cannot be read.
    """
    rows = read_model_spec(folder).vocab_size
    path = folder / "tokenizer.json"
    if not path.is_file():
        return rows
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        last = max([-1, *_vocabulary(content["model"]), *(token["id"] for token in _added(content))])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a valid tokenizer: {error!r}") from error
    return min(last + 1, rows) or rows


def _vocabulary(model: dict[str, Any]) -> list[int]:
    """Ids of the tokenizer's own model: a table from token to id, or a list in order (Unigram)."""
    vocab = model["vocab"]
    return list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))


def _added(content: dict[str, Any]) -> list[dict[str, Any]]:
    return content.get("added_tokens") or []
