"""The planner's benchmark: its numbers are those of the arithmetic, and its options are checked."""

from __future__ import annotations

import json

import pytest

from benchmarks.models import MODELS
from benchmarks.run import main
from benchmarks.sizes import parse_sizes
from benchmarks.weight_sync_plan import measure
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import volume
from grpo_mlm.layouts.model import canonical_tensors


def parameters(name: str) -> int:
    return sum(volume(tuple((0, n) for n in shape)) for shape in canonical_tensors(MODELS[name]).values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-0.5b", 0.494),
        ("qwen2.5-7b", 7.616),
        ("qwen3-0.6b", 0.596),
        ("qwen3-32b", 32.762),
        ("llama-3.3-70b", 70.554),
        ("qwen3-30b-a3b", 30.532),
        ("qwen3-235b-a22b", 235.094),
    ],
)
def test_models_have_the_number_of_parameters_that_their_cards_state(name: str, billions: float) -> None:
    assert round(parameters(name) / 1e9, 3) == billions


def test_the_32b_plan_moves_what_the_arithmetic_says() -> None:
    """64 trainer ranks to 8 engines of 4: a quarter of the model and all norms to each rank, evenly from all."""
    trainer, engines = measure("qwen3-32b", "tp=8,dp=8", "tp=4,replicas=8").rows
    assert (trainer["ranks"], engines["ranks"]) == (64, 32)
    assert engines["least bytes a rank"] == engines["most bytes a rank"] == 16_382_076_928
    assert trainer["total bytes"] == engines["total bytes"] == 32 * 16_382_076_928
    assert trainer["most / mean"] < 1.05


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [
        "run",
        "weight_sync_plan",
        "--model",
        "qwen2.5-0.5b",
        "--train",
        "tp=2",
        "--rollout",
        "tp=1",
        "--json",
    ]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][1]["total bytes"] == 2 * parameters("qwen2.5-0.5b")
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("text", "named"),
    [("tp", "'tp' is not key=number"), ("x=1", "'x=1'"), ("tp=0", "tp='0'"), ("tp=1,tp=2", "twice")],
)
def test_sizes_that_make_no_sense_are_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match=named):
        parse_sizes(text, "--train", {"tp": 1, "pp": 1})
