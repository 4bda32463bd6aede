"""What is wrong before any process starts."""

from pathlib import Path

import pytest

from grpo_mlm.config.schema import ModelConfig
from grpo_mlm.errors import UserError
from grpo_mlm.trainer.prepare import model_folder


def test_a_maker_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.maker: os:listdir.*FileNotFoundError"):
        model_folder(ModelConfig(path=str(tmp_path / "model"), maker="os:listdir"))
