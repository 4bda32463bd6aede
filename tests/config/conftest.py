"""A smallest valid config as a file, and what a bad one is answered with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mlm.config import Config, load_config
from grpo_mlm.errors import UserError

SMALLEST = """
model: {path: some/folder}
data: {train_files: [a.jsonl], val_files: [b.jsonl]}
reward: {functions: [{name: exact_match}]}
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Config]:
    """Load the smallest config with overrides."""
    path = tmp_path / "run.yaml"
    path.write_text(SMALLEST)
    return lambda *overrides: load_config(path, list(overrides))


@pytest.fixture
def refusal(load: Callable[..., Config]) -> Callable[..., str]:
    """The text of the error that overrides to the smallest config end in."""

    def text_of(*overrides: str) -> str:
        with pytest.raises(UserError) as caught:
            load(*overrides)
        return str(caught.value)

    return text_of
