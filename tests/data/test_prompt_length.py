"""The limit on prompts, counted on the ids that are sent, and what happens to longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mlm.errors import UserError
from tests.data.rendered import CHAT, TURNS, load, sent, text_of
from tests.data.tokens import BOS, VOCAB, characters, merged_bytes


def test_the_limit_is_on_the_ids_that_are_sent(tmp_path: Path) -> None:
    """DAT-02: limit 10; 5 characters are 11 ids with the template, 4 are 10."""
    rows = [{"prompt": "12345"}, {"prompt": "1234"}, {"prompt": "1"}]
    found = load(tmp_path, rows, max_prompt_length=10, truncation="drop")
    assert sent(found) == ["<u>1234<a>", "<u>1<a>"]
    assert found.dropped == {"too_long": 1}
    assert [prompt.row_index for prompt in found.prompts] == [1, 2]


def test_bos_and_system_prompt_count_too(tmp_path: Path) -> None:
    """DAT-02"""
    tokenizer = characters("{{ bos_token }}" + TURNS)
    settings = {"system_prompt": "box", "truncation": "drop"}
    exact = load(tmp_path, [{"prompt": "1"}, {"prompt": "12"}], tokenizer, max_prompt_length=14, **settings)
    assert sent(exact) == ["<bos><s>box<u>1<a>"]
    assert exact.dropped == {"too_long": 1}


def test_a_longer_prompt_is_an_error_by_default(tmp_path: Path) -> None:
    """DAT-03"""
    with pytest.raises(UserError) as caught:
        load(tmp_path, [{"prompt": CHAT[1:2]}, {"prompt": CHAT}], max_prompt_length=12)
    message = str(caught.value)
    assert (
        f"{tmp_path / 'rows.jsonl'}, row 2: the prompt has 30 tokens, data.max_prompt_length is 12" in message
    )
    assert "data.truncation" in message


@pytest.mark.parametrize(
    ("limit", "kept"),
    [
        (30, "<s>be brief<u>1+1<a>2<u>2+2<a>"),
        (29, "<s>be brief<u>+1<a>2<u>2+2<a>"),
        (27, "<s>be brief<u><a>2<u>2+2<a>"),
        (25, "<s>be brief<u><a><u>+2<a>"),
        (24, "<s>be brief<u><a><u>2<a>"),
        (23, "be brief<u>1+1<a>2<u>2+2<a>"[-23:]),
        (5, "+2<a>"),
    ],
)
def test_chat_rows_lose_their_oldest_text_and_keep_the_template(
    tmp_path: Path, limit: int, kept: str
) -> None:
    """DAT-03: the generation prompt stays whole; where the rest leaves no room for text, the first ids go."""
    found = load(tmp_path, [{"prompt": CHAT}], max_prompt_length=limit, truncation="left")
    assert sent(found) == [kept]
    assert found.dropped == {}


@pytest.mark.parametrize("limit", range(2, 33))
def test_a_cut_prompt_fits_and_keeps_bos_and_the_end(tmp_path: Path, limit: int) -> None:
    """DAT-03"""
    tokenizer = characters("{{ bos_token }}" + TURNS)
    (prompt,) = load(
        tmp_path, [{"prompt": CHAT}], tokenizer, max_prompt_length=limit, truncation="left"
    ).prompts
    assert len(prompt.token_ids) <= limit
    assert prompt.token_ids[0] == VOCAB[BOS]
    assert VOCAB[BOS] not in prompt.token_ids[1:]
    end = text_of(prompt.token_ids[1:])
    assert end.endswith("<a>"[-(limit - 1) :])


def test_plain_prompts_lose_their_first_ids_and_keep_bos(tmp_path: Path) -> None:
    settings = {"max_prompt_length": 4, "truncation": "left", "apply_chat_template": False}
    assert sent(load(tmp_path, [{"prompt": "123456"}], characters(None), **settings)) == ["3456"]
    assert sent(load(tmp_path, [{"prompt": "123456"}], characters(None, True), **settings)) == ["<bos>456"]


@pytest.mark.parametrize("limit", range(7, 22))
def test_a_cut_inside_a_character_leaves_no_broken_one(tmp_path: Path, limit: int) -> None:
    """Chinese characters of three bytes each; 6 ids are the template's."""
    settings = {"max_prompt_length": limit, "truncation": "left"}
    text = "\u6f22\u5b57\u6c34\u706ba"
    (prompt,) = load(tmp_path, [{"prompt": text}], merged_bytes(TURNS), **settings).prompts
    assert len(prompt.token_ids) <= limit
    assert prompt.text == f"<u>{text[-1 - min(4, (limit - 7) // 3) :]}<a>"
