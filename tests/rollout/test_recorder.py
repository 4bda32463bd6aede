"""The layout recorded from vLLM's loaders: equal to the hand-written rule, and to what the loaders do with values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout, Piece
from grpo_mlm.layouts.merge import merge_pieces
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.layouts.packed import unpack_layout
from grpo_mlm.layouts.vllm import vllm_layout
from tests.rollout.models import CONFIGS, write_config
from tests.rollout.odd_loaders import REFUSED, SHAPES, Odd, cast_and_cut
from tests.rollout.rank_models import Job, record_on_ranks, vllm_process

pytestmark = pytest.mark.slow

SIZES = [(tp, ep) for tp in (1, 2, 4) for ep in (False, True) if tp > 1 or not ep]
CASES = [(name, tp, ep) for name in CONFIGS for tp, ep in SIZES if not ep or "experts" in str(CONFIGS[name])]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    at = tmp_path_factory.mktemp("configs")
    return {name: write_config(name, at / name) for name in CONFIGS}


@pytest.fixture(scope="module")
def vllm() -> Iterator[ProcessPoolExecutor]:
    with vllm_process() as process:
        yield process


@pytest.fixture(scope="module")
def recorded(
    vllm: ProcessPoolExecutor, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[Job, int], dict[str, Any]]:
    """All cases at once."""
    jobs = [Job(folders[name], tp, ep) for name, tp, ep in CASES]
    return vllm.submit(record_on_ranks, jobs, tmp_path_factory.mktemp("meeting")).result()


def normal(layout: Layout) -> Layout:
    """The same for every layout that says the same of each element."""
    return replace(layout, pieces=merge_pieces(layout.pieces), fills=tuple(sorted(layout.fills)))


@pytest.mark.parametrize(("name", "tp", "ep"), CASES)
def test_it_is_the_hand_written_rule_and_what_the_loaders_do(
    folders: dict[str, Path], recorded: dict[tuple[Job, int], dict[str, Any]], name: str, tp: int, ep: bool
) -> None:
    """Element by element; and the same model's loaders, given random values, fill its parameters in this way."""
    spec = read_model_spec(folders[name])
    for rank in range(tp):
        said = recorded[Job(folders[name], tp, ep), rank]
        assert normal(unpack_layout(said["layout"])) == normal(vllm_layout(spec, tp, rank, ep))
        assert said["wrong"] == said["unknown"] == []


def _record_odd(load: str) -> tuple[str, Layout | None]:
    """The error, or the layout, of a model with such loaders; its parameters have to stay the ones they were."""
    from grpo_mlm.rollout.recorder import record_layout

    model = Odd(REFUSED[load][0] if load in REFUSED else cast_and_cut)
    before, values = list(model.parameters()), [parameter.clone() for parameter in model.parameters()]
    error, layout = "", None
    try:
        layout = record_layout(model, SHAPES, torch.float32)
    except RunFailure as failure:
        error = str(failure)
    assert all(now is was for now, was in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(now, was) for now, was in zip(model.parameters(), values, strict=True))
    assert torch.equal(model.layer.scale, torch.ones(4))
    return error, layout


@pytest.mark.parametrize("load", REFUSED)
def test_a_loader_that_no_layout_describes_is_refused_by_name(vllm: ProcessPoolExecutor, load: str) -> None:
    """WSY-09: also tensors that loaders skip, and parameters that they leave as they were."""
    error, _ = vllm.submit(_record_odd, load).result()
    assert re.search(REFUSED[load][1], error), error


def test_casts_copies_and_columns_are_followed(vllm: ProcessPoolExecutor) -> None:
    _, layout = vllm.submit(_record_odd, "cast and cut").result()
    assert layout == Layout(
        {"layer.weight": (4, 4), "layer.bias": (4,)},
        (
            Piece("y.weight", ((0, 4),), "layer.bias", (0,)),
            Piece("x.weight", ((2, 4), (0, 4)), "layer.weight", (0, 0)),
            Piece("x.weight", ((0, 2), (1, 4)), "layer.weight", (2, 0)),
        ),
        (("layer.weight", ((2, 4), (3, 4))),),
    )
