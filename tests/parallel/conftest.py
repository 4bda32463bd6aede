"""Rank processes and model folders that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.parallel.ranks import Ranks
from tests.parallel.samples import make_model


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    processes = Ranks()
    yield processes
    processes.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """A model by family and config fields: its folder, and itself as transformers runs it."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(family: str, **fields: Any) -> tuple[Path, PreTrainedModel]:
        key = f"{family}-{sorted(fields.items())}"
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = folder, make_model(folder, family, **fields)
        return made[key]

    return get
