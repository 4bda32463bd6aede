"""From rows to the exact ids that are sent. A character is a token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_mlm.config.schema import DataConfig
from grpo_mlm.data.prompts import load_prompts, load_tokenizer
from grpo_mlm.errors import UserError
from tests.data.rendered import CHAT, TURNS, load, sent, write
from tests.data.tokens import characters

# Rendering


def test_string_prompts_become_a_user_message(tmp_path: Path) -> None:
    assert sent(load(tmp_path, [{"prompt": "1+1?"}])) == ["<u>1+1?<a>"]


def test_chat_rows_are_rendered_whole(tmp_path: Path) -> None:
    """MSK-10: one rendering of all turns; nothing is encoded message by message."""
    assert sent(load(tmp_path, [{"prompt": CHAT}])) == ["<s>be brief<u>1+1<a>2<u>2+2<a>"]


def test_a_template_that_changes_earlier_turns_is_rendered_whole(tmp_path: Path) -> None:
    """MSK-10: here only the last turn shows its text, which pieces put together could not."""
    last = "{% for m in messages %}<{{ m['role'][0] }}>{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    assert sent(load(tmp_path, [{"prompt": CHAT}], characters(last))) == ["<s><u><a><u>2+2"]


@pytest.mark.parametrize("prompt", ["1+1?", [{"role": "user", "content": "1+1?"}]])
def test_the_prompt_may_lie_in_any_column(tmp_path: Path, prompt: Any) -> None:
    """DAT-07"""
    found = load(tmp_path, [{"problem": prompt, "prompt": "another"}], prompt_key="problem")
    assert sent(found) == ["<u>1+1?<a>"]


def test_the_system_prompt_comes_first_where_a_row_has_none(tmp_path: Path) -> None:
    found = load(tmp_path, [{"prompt": "a"}, {"prompt": CHAT[1:]}, {"prompt": CHAT}], system_prompt="box it")
    assert sent(found) == [
        "<s>box it<u>a<a>",
        "<s>box it<u>1+1<a>2<u>2+2<a>",
        "<s>be brief<u>1+1<a>2<u>2+2<a>",
    ]


def test_arguments_reach_the_template(tmp_path: Path) -> None:
    template = TURNS + "{% if not enable_thinking %}<think></think>{% endif %}"
    found = load(
        tmp_path, [{"prompt": "a"}], characters(template), chat_template_kwargs={"enable_thinking": False}
    )
    assert sent(found) == ["<u>a<a><think></think>"]


def test_without_the_template_strings_are_sent_as_they_are(tmp_path: Path) -> None:
    found = load(tmp_path, [{"prompt": " 1+1=\n"}], characters(None), apply_chat_template=False)
    assert sent(found) == [" 1+1=\n"]


def test_text_and_ids_are_of_the_same_rendering(tmp_path: Path) -> None:
    found = load(tmp_path, [{"prompt": "what is 1 + 1 ? ."}], characters("{{ bos_token }}" + TURNS))
    assert found.prompts[0].text == "<bos><u>what is 1 + 1 ? .<a>" == sent(found)[0]


# Exactly one beginning of sequence (MSK-04)

INDIRECT = "{% set start = '<b' ~ 'os>' %}{% if messages %}{{ start }}{% endif %}" + TURNS


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    "template", ["{{ bos_token }}" + TURNS, "<bos>" + TURNS, INDIRECT, "<bos><bos>" + TURNS]
)
def test_chat_rows_get_one_bos_whoever_puts_it(tmp_path: Path, template: str, adds_bos: bool) -> None:
    """MSK-04: also where no BOS is written in the template's text, and under every policy."""
    tokenizer = characters(template, adds_bos)
    assert sent(load(tmp_path, [{"prompt": "1+1?"}], tokenizer)) == ["<bos><u>1+1?<a>"]
    cut = load(tmp_path, [{"prompt": "1+1?"}], tokenizer, truncation="left", max_prompt_length=9)
    assert sent(cut) == ["<bos><u>1?<a>"]


@pytest.mark.parametrize("prompt", ["1+1?", "<bos>1+1?"])
def test_string_prompts_get_one_bos_also_where_the_row_has_it(tmp_path: Path, prompt: str) -> None:
    """MSK-04"""
    tokenizer = characters(None, encoding_adds_bos=True)
    assert sent(load(tmp_path, [{"prompt": prompt}], tokenizer, apply_chat_template=False)) == ["<bos>1+1?"]


# Prompts without text

EMPTY = ["", " \n", [], [{"role": "user", "content": " "}], [{"role": "system", "content": "be brief"}]]


@pytest.mark.parametrize("prompt", EMPTY)
def test_a_prompt_without_text_is_an_error_or_counted(tmp_path: Path, prompt: Any) -> None:
    """The template's own text and the system prompt do not make it a prompt."""
    rows = [{"prompt": "1"}, {"prompt": prompt}]
    with pytest.raises(UserError, match=r"rows.jsonl, row 2: the prompt has no text"):
        load(tmp_path, rows, system_prompt="box it")
    found = load(tmp_path, rows, system_prompt="box it", truncation="drop")
    assert found.dropped == {"empty": 1}
    assert sent(found) == ["<s>box it<u>1<a>"]


def test_rows_that_are_all_dropped_are_an_error(tmp_path: Path) -> None:
    rows = [{"prompt": "123456"}, {"prompt": "1234567"}, {"prompt": ""}]
    with pytest.raises(UserError, match=r"no usable prompt, all were dropped \(2 too_long, 1 empty\)"):
        load(tmp_path, rows, truncation="drop", max_prompt_length=10)


# Columns


def test_rows_reach_rewards_untouched(tmp_path: Path) -> None:
    """DAT-06: all columns, also under a cut, an added system prompt and other names."""
    rows = [{"prompt": CHAT, "gold": ["1", {"a": None}], "level": 3, "origin": "book", "answer": "no"}]
    found = load(
        tmp_path,
        rows,
        answer_key="gold",
        source_key="origin",
        system_prompt="x",
        truncation="left",
        max_prompt_length=26,
    )
    (prompt,) = found.prompts
    assert prompt.row == rows[0]
    assert (prompt.answer, prompt.data_source) == (["1", {"a": None}], "book")


def test_a_row_without_answer_or_origin_has_none_and_its_file_s_name(tmp_path: Path) -> None:
    (prompt,) = load(tmp_path, [{"prompt": "1"}]).prompts
    assert (prompt.answer, prompt.data_source) == (None, "rows")


def test_a_missing_column_is_named_with_those_present(tmp_path: Path) -> None:
    """DAT-06"""
    with pytest.raises(UserError) as caught:
        load(tmp_path, [{"prompt": "1"}, {"question": "1", "answer": "2"}])
    message = str(caught.value)
    assert f"{tmp_path / 'rows.jsonl'}, row 2: no column 'prompt' (data.prompt_key)" in message
    assert "question, answer" in message


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {"role": "user", "content": "a"}, ["a"], [{"role": "user"}], [{"content": "a"}],
     [{"role": "user", "content": None}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]],
)  # fmt: skip
def test_a_prompt_of_another_shape_is_named(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(UserError, match=r"row 1: column 'prompt' is a string or a list of \{role, content\}"):
        load(tmp_path, [{"prompt": prompt}])


@pytest.mark.parametrize("apply", [True, False])
def test_text_that_no_tokenizer_takes_is_named_by_its_row(tmp_path: Path, apply: bool) -> None:
    """Half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "a\\ud800"}\n')
    spec = str(tmp_path / "rows.jsonl")
    config = DataConfig(train_files=[spec], apply_chat_template=apply)
    with pytest.raises(UserError, match=r"row 2: the prompt is not valid Unicode text: .*'\\ud800'"):
        load_prompts([spec], config, characters(TURNS))


def test_chat_rows_without_a_template_are_refused(tmp_path: Path) -> None:
    for prompt, apply in (("1", True), (CHAT, True), (CHAT, False)):
        with pytest.raises(UserError, match=r"row 1: the model's tokenizer has no chat template"):
            load(tmp_path, [{"prompt": prompt}], characters(None), apply_chat_template=apply)


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TURNS
    )
    with pytest.raises(UserError, match=r"row 2: the chat template refuses the messages: no system role"):
        load(tmp_path, [{"prompt": "1"}, {"prompt": CHAT}], characters(template))


# Sources


def test_the_same_row_gives_the_same_ids_in_training_and_validation(tmp_path: Path) -> None:
    """DAT-08, DAT-09: from another file, and as Parquet."""
    rows = [{"prompt": CHAT}, {"prompt": CHAT[1:]}]
    train, val = write(tmp_path / "train.jsonl", rows), str(tmp_path / "val.parquet")
    pq.write_table(pa.Table.from_pylist(rows), val)
    config = DataConfig(train_files=[train], val_files=[val], system_prompt="box it")
    tokenizer = characters("{{ bos_token }}" + TURNS, encoding_adds_bos=True)
    ids = [
        [prompt.token_ids for prompt in load_prompts(specs, config, tokenizer).prompts]
        for specs in (config.train_files, config.val_files)
    ]
    assert ids[0] == ids[1]
    assert [len(prompt) for prompt in ids[0]] == [31, 29]


def test_fields_of_other_rows_messages_do_not_show_in_a_template(tmp_path: Path) -> None:
    """Parquet gives every message every field, as None; a template asks whether a field is there."""
    rows = [
        {"prompt": [{"role": "user", "content": "a", "name": "ann"}]},
        {"prompt": [{"role": "user", "content": "b"}]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    named = (
        "{% for m in messages %}{% if m.name is defined %}{{ m.name }}/{% endif %}{{ m.content }}{% endfor %}"
    )
    spec = str(tmp_path / "a.parquet")
    assert sent(load_prompts([spec], DataConfig(train_files=[spec]), characters(named))) == ["ann/a", "b"]


def test_sources_are_joined_in_order_and_rows_count_in_their_own(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", [{"prompt": "1"}, {"prompt": "2", "data_source": "x"}])
    two = write(tmp_path / "two.jsonl", [{"prompt": "3"}])
    gym = "reasoning_gym:chain_sum?size=1"
    found = load_prompts([one, two, gym], DataConfig(train_files=[one]), characters(TURNS))
    assert [(p.data_source, p.row_index) for p in found.prompts] == [
        ("one", 0),
        ("x", 1),
        ("two", 0),
        ("chain_sum", 0),
    ]


# The tokenizer's folder


def test_a_saved_tokenizer_loads_with_its_template(tmp_path: Path) -> None:
    characters(TURNS).save_pretrained(tmp_path / "model")
    assert sent(load(tmp_path, [{"prompt": "1"}], load_tokenizer(tmp_path / "model"))) == ["<u>1<a>"]


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other", "config only"])
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "model"
    if damage != "missing":
        folder.mkdir()
    if damage in ("cut", "other"):
        characters(TURNS).save_pretrained(folder)
        whole = (folder / "tokenizer.json").read_text()
        (folder / "tokenizer.json").write_text(whole[: len(whole) // 2] if damage == "cut" else '{"a": 1}')
    if damage == "config only":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=f"{folder}: no usable tokenizer"):
        load_tokenizer(folder)
