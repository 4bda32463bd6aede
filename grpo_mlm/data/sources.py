"""Where rows come from: JSONL and Parquet files, and reasoning-gym's generators."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from grpo_mlm.config.suggest import did_you_mean
from grpo_mlm.errors import UserError

Row = dict[str, Any]
GYM = "reasoning_gym:"
GYM_DEFAULTS = {"size": 500, "seed": 0}  # of its own, a task would draw a new seed in every run


def read_rows(spec: str) -> list[Row]:
    """All rows of one source. UserError names the source, and the line where there is one."""
    if spec.startswith(GYM):
        return _reasoning_gym(spec)
    path = Path(os.path.expanduser(spec))
    readers = {".jsonl": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise UserError(f"{spec}: a data source is a .jsonl or .parquet file, or {GYM}TASK?size=N&key=value")
    if not path.is_file():
        raise UserError(f"{spec}: no such file")
    try:
        rows = readers[path.suffix](path)
    except OSError as error:
        raise UserError(f"{spec}: cannot be read: {error}") from error
    if not rows:
        raise UserError(f"{spec}: the file has no rows")
    return rows


def _jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, line {number}: not valid JSON: {error}") from error
            if not isinstance(row, dict):
                raise UserError(
                    f"{path}, line {number}: a row is a JSON object, this is a {type(row).__name__}"
                )
            rows.append(row)
    return rows


def _parquet(path: Path) -> list[Row]:
    """Rows of plain Python values. pyarrow alone reads the columns, and ignores what other libraries noted in the
    schema, which their own older versions may not understand.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path).read().to_pylist()
    except (pa.ArrowException, ValueError, LookupError) as error:  # or a value that no Python type holds
        raise UserError(f"{path}: not a readable Parquet file: {error}") from error


def _reasoning_gym(spec: str) -> list[Row]:
    """`reasoning_gym:TASK?size=N&seed=S&key=value`: the task's entries, with `prompt` for their question and the
    task as `data_source`. Values are JSON scalars where they read as such.
    """
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, _, query = spec.removeprefix(GYM).partition("?")
    if task not in DATASETS:
        raise UserError(f"{spec}: reasoning_gym has no task {task!r}{did_you_mean(task, DATASETS)}")
    settings: dict[str, Any] = {}
    known = DATASETS[task][1].__dataclass_fields__
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in known:
            near = did_you_mean(key, known) or f"; it has {', '.join(sorted(known))}"
            raise UserError(f"{spec}: task {task} has no setting {key!r}{near}")
        if key in settings:
            raise UserError(f"{spec}: {key} is given twice")
        settings[key] = _value(text)
    try:
        dataset = reasoning_gym.create_dataset(task, **GYM_DEFAULTS | settings)
        entries = [dataset[i] for i in range(len(dataset))]
    except Exception as error:  # tasks check their settings as they like, some with a plain AttributeError
        raise UserError(
            f"{spec}: reasoning_gym refuses these settings: {type(error).__name__}: {error}"
        ) from error
    return [{**entry, "prompt": entry["question"], "data_source": task} for entry in entries]


def _value(text: str) -> Any:
    """A JSON scalar where it reads as one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
