"""Tiny model folders shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_mlm.small_models.tiny import make_llama, make_qwen3
from tests.rollout.models import variant


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings, q/k norms."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    make_qwen3(folder)
    return folder


@pytest.fixture(scope="session")
def qwen3_moved(qwen3: Path) -> Path:
    """The same model with other weights."""
    return variant(qwen3, qwen3.with_name("qwen3_moved"), seed=1)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of its own."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    make_llama(folder)
    return folder


@pytest.fixture(scope="session")
def llama_moved(llama: Path) -> Path:
    return variant(llama, llama.with_name("llama_moved"), seed=2)
