"""How many ids the tokenizer knows, against the tokenizers library's own count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.known_tokens import known_tokens
from tests.layouts.test_model import folder

TOKENIZERS = {
    "bpe": Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[])),
    "word level": Tokenizer(models.WordLevel(vocab={"a": 0, "b": 9}, unk_token="a")),
    "unigram": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("b", -2.0)], unk_id=0)),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("added", [(), ("<eos>", "<pad>")])
def test_every_id_of_the_tokenizer_counts_and_none_past_it(
    tmp_path: Path, kind: str, added: tuple[str, ...]
) -> None:
    """ROL-10: tokens of the vocabulary, and those added after it, as chat models do."""
    tokenizer = Tokenizer.from_str(TOKENIZERS[kind].to_str())
    tokenizer.add_special_tokens([AddedToken(token) for token in added])
    tokenizer.save(str(folder(tmp_path) / "tokenizer.json"))
    last = max(tokenizer.get_vocab(with_added_tokens=True).values())
    assert known_tokens(tmp_path) == last + 1
    assert tokenizer.id_to_token(last) is not None


def test_without_tokenizer_json_and_with_more_tokens_than_rows_it_is_the_models_rows(tmp_path: Path) -> None:
    folder(tmp_path, vocab_size=2)
    assert known_tokens(tmp_path) == 2
    TOKENIZERS["bpe"].save(str(tmp_path / "tokenizer.json"))
    assert known_tokens(tmp_path) == 2


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"model": {}}), json.dumps({"model": {"vocab": 3}})]
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (folder(tmp_path) / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a valid tokenizer"):
        known_tokens(tmp_path)
