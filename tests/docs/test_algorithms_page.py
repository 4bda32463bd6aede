"""Every line of settings on the page of the mathematics is a config that loads, and every file it names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_mlm.config import load_config

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"
ROWS = re.findall(
    r"^\| ([^|]+ \(\d{4}\.\d{5}\)) \| `(.+)` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
)


@pytest.mark.parametrize(("paper", "settings"), ROWS, ids=[paper for paper, _ in ROWS])
def test_the_settings_of_each_paper_load(paper: str, settings: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: x}\ndata: {train_files: [a.jsonl], max_response_length: 20480}\n"
        "reward: {functions: [{name: math}]}\nactor: {max_tokens_per_gpu: 32768}\n"
    )
    load_config(path, settings.replace("LIMIT", "20480").split())


def test_there_are_rows_and_the_files_exist() -> None:
    assert len(ROWS) == 7
    package = PAGE.parents[1] / "grpo_mlm"
    for name in set(re.findall(r"`(?:kernels/)?(\w+\.py)", PAGE.read_text(encoding="utf-8"))) - {"file.py"}:
        assert (package / "algorithms" / name).is_file() or (package / "kernels" / name).is_file(), name
