"""What the engine writes is what it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow


def test_exported_folder_loads_as_the_trained_model(
    tmp_path: Path, ranks: Ranks, model: Callable[..., Any]
) -> None:
    folder, hf = model("qwen2", tie_word_embeddings=True)
    batch, world = make_batch([(3, 5), (2, 4)]), make_world(tp=2, pp=2)
    weights = np.full(9, 1 / 9, dtype=np.float32)
    with ranks.engines(make_config(folder), folder, world) as run:
        run(jobs.update, batch, [[[[0], [1]]]], weights)
        trained = whole(folder, world, run(jobs.weights))
        run(jobs.export, tmp_path / "out")
    loaded = type(hf).from_pretrained(tmp_path / "out")
    for name, parameter in loaded.named_parameters():
        assert np.array_equal(parameter.detach().numpy(), trained[name]), name
        assert not np.array_equal(parameter.detach().numpy(), hf.get_parameter(name).detach().numpy()), name
