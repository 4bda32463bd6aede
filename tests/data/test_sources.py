"""Rows from JSONL, Parquet and reasoning-gym's tasks; what bad files and settings are answered with."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_mlm.data.sources import read_rows
from grpo_mlm.errors import UserError

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


def refusal(spec: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        read_rows(str(spec))
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


# JSONL


def test_jsonl_rows_arrive_as_they_are(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2 \u00e9\u6f22", "answer": 4, "extra": {"a": [1, None]}}, {"prompt": CHAT}]
    path = write(tmp_path / "a.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    assert read_rows(str(path)) == rows


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n  \n{"prompt": "b"}\n\n')
    assert [row["prompt"] for row in read_rows(str(path))] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b"[" * 200_000, "not valid JSON"),
        (b"[1, 2]", "a row is a JSON object, this is a list"),
        (b'"text"', "a row is a JSON object, this is a str"),
    ],
    ids=["cut", "not utf-8", "deep", "list", "string"],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: bytes, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"prompt": "a"}\n\n' + line + b'\n{"prompt": "b"}\n')
    assert f"{path}, line 3: {says}" in refusal(path)


# Parquet


def test_parquet_chat_rows_arrive_as_plain_lists_and_dicts(tmp_path: Path) -> None:
    """DAT-09: list-of-struct messages written by pyarrow alone; a field that is missing in a message is None."""
    chat = [{"role": "user", "content": "hi", "name": "ann"}, {"role": "assistant", "content": "ho"}]
    table = pa.Table.from_pylist([{"prompt": CHAT, "answer": 2}, {"prompt": chat, "answer": 3}])
    assert pa.types.is_struct(table.schema.field("prompt").type.value_type)
    pq.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert type(rows[0]["prompt"]) is list
    assert type(rows[0]["prompt"][0]) is dict
    assert [[m["content"] for m in row["prompt"]] for row in rows] == [["be brief", "1+1"], ["hi", "ho"]]
    assert [row["answer"] for row in rows] == [2, 3]


def test_parquet_is_read_whatever_another_library_noted_in_its_schema(tmp_path: Path) -> None:
    """DAT-09: a feature type that older readers of that library do not know."""
    noted = {"info": {"features": {"prompt": {"feature": {"x": {"dtype": "string"}}, "_type": "List"}}}}
    table = pa.Table.from_pylist([{"prompt": CHAT}])
    table = table.replace_schema_metadata({"huggingface": json.dumps(noted)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet")) == [{"prompt": CHAT}]


def test_nested_columns_of_parquet_are_plain_values(tmp_path: Path) -> None:
    row = {"prompt": "a", "reward_model": {"ground_truth": ["1", "2"], "style": "rule"}, "level": 3, "x": 0.5}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert json.loads(json.dumps(read_rows(str(tmp_path / "a.parquet")))) == [row]


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for name, content in (("cut", whole[: len(whole) // 2]), ("text", b"hello"), ("none", b"")):
        path = write(tmp_path / f"{name}.parquet", content)
        assert f"{path}: not a readable Parquet file" in refusal(path)


def test_parquet_values_without_a_python_type_are_the_users_error(tmp_path: Path) -> None:
    columns = {
        "t": pa.array([2**62], pa.timestamp("ns")),
        "z": pa.array([1], pa.timestamp("us", tz="No/Where")),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({name: column}), path)
        assert f"{path}: not a readable Parquet file" in refusal(path)


# Files of either kind


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.jsonl") == f"{tmp_path / 'none.jsonl'}: no such file"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").mkdir()
    assert "no such file" in refusal(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["rows.json", "rows.csv", "rows"])
def test_other_kinds_of_file_are_refused_with_the_known_ones(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, '{"prompt": "a"}')
    assert ".jsonl or .parquet file, or reasoning_gym:" in refusal(tmp_path / name)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    assert "has no rows" in refusal(write(tmp_path / "a.jsonl", "\n\n"))
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert "has no rows" in refusal(tmp_path / "a.parquet")


# reasoning-gym


def test_a_task_gives_its_questions_as_prompts_with_answer_and_metadata() -> None:
    rows = read_rows(
        "reasoning_gym:chain_sum?size=5&seed=7&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    )
    assert len(rows) == 5
    for row in rows:
        left, sign, right = row["prompt"].split(":")[1].removesuffix("=").split()
        assert row["answer"] == str(int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert row["data_source"] == "chain_sum"
        assert row["metadata"]["source_dataset"] == "chain_sum"


def test_a_task_s_rows_depend_on_the_seed_and_are_the_same_in_every_run() -> None:
    """Without `seed=` too: a resumed run finds the rows that its position in the data is about."""
    assert read_rows("reasoning_gym:chain_sum?size=4") == read_rows("reasoning_gym:chain_sum?size=4")
    by_seed = [read_rows(f"reasoning_gym:chain_sum?size=4&seed={seed}") for seed in (1, 1, 2)]
    assert by_seed[0] == by_seed[1] != by_seed[2]


def test_values_are_json_where_they_read_as_such() -> None:
    spec = "reasoning_gym:base_conversion?size=3&seed=1&min_base=2&max_base=3&min_value=5&max_value=9"
    assert {row["metadata"]["source_base"] for row in read_rows(spec)} <= {2, 3}
    letters = "reasoning_gym:letter_counting?size=2&min_words=3&max_words=3"
    assert all(len(row["metadata"]["span"]) == 3 for row in read_rows(letters))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("chainsum", "no task 'chainsum'; did you mean chain_sum?"),
        ("", "no task ''"),
        ("chain_sum?min_digit=2", "no setting 'min_digit'; did you mean min_digits?"),
        ("chain_sum?zzz=2", "no setting 'zzz'; it has"),
        ("chain_sum?size=0", "size must be positive"),
        ("chain_sum?size=many", "refuses these settings"),
        ("chain_sum?size=", "refuses these settings"),
        ("chain_sum?size=2.5", "refuses these settings"),
        ("chain_sum?min_terms=5&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sum?size=2&size=3", "size is given twice"),
        ("bf?size=2&difficulty=9", "refuses these settings"),
    ],
)
def test_a_wrong_task_or_setting_is_named_with_the_nearest(spec: str, says: str) -> None:
    message = refusal(f"reasoning_gym:{spec}")
    assert message.startswith(f"reasoning_gym:{spec}: ")
    assert says in message
