"""What is logged can be read back, by step, with the standard readers."""

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_mlm.telemetry.clock import Clock
from grpo_mlm.telemetry.console import RunConsole
from grpo_mlm.telemetry.samples import write_samples
from grpo_mlm.telemetry.trackers import JsonlTracker, TensorBoardTracker
from tests.telemetry.test_batch_metrics import make_batch


def test_metrics_jsonl_has_one_object_a_step_and_null_for_nan(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"a": 0.5})
    tracker.log(2, {"a": float("nan"), "b": 2.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 0.5}, {"step": 2, "a": None, "b": 2.0}]


def test_tensorboard_reads_back_values_at_their_steps(tmp_path: Path) -> None:
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(3, {"actor/kl": 0.25})
    tracker.log(4, {"actor/kl": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/kl")] == [(3, 0.25), (4, 0.5)]


def test_samples_file_pairs_each_completion_with_its_own_reward(tmp_path: Path) -> None:
    """MET-07, on the file that people read."""
    batch = make_batch([1, np.nan], [2, 1], ["stop", "abort"])
    batch.response_text = ["first", "second"]
    batch.advantages = np.array([0.5, 0.5, 0.0], dtype=np.float32)
    write_samples(batch, tmp_path / "step_1.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "step_1.jsonl").read_text().splitlines()]
    assert [(x["response"], x["reward"], x["valid"], x["advantage"]) for x in lines] == [
        ("first", 1.0, True, 0.5),
        ("second", None, False, 0.0),
    ]


def test_the_step_line_shows_the_numbers_and_quiet_shows_nothing() -> None:
    console = RunConsole()
    console.console = Console(record=True, width=200)
    metrics = {"critic/rewards/mean": 0.25, "actor/grad_norm": 1.5, "val-core/sums/reward/mean@1": 0.75}
    console.step(3, 9, metrics)
    text = console.console.export_text()
    assert "step 3/9" in text
    assert "reward 0.250" in text
    assert "grad 1.500" in text
    assert "val-core/sums/reward/mean@1 0.750" in text
    assert RunConsole(quiet=True).console.quiet


def test_the_samples_table_shows_markup_of_a_model_as_text() -> None:
    console = RunConsole()
    console.console = Console(record=True, width=200)
    batch = make_batch([1, 0], [1, 1], ["stop", "stop"])
    batch.response_text = ["[red]not markup[/red]", "x"]
    console.samples(batch, 1)
    assert "[red]not markup[/red]" in console.console.export_text()


def test_phases_add_up_and_moved_time_changes_phase_only() -> None:
    clock = Clock()
    with clock("gen"):
        sum(range(200_000))
    clock.move("gen", "reward", 0.001)
    metrics = clock.metrics()
    assert metrics["timing_s/reward"] == 0.001
    assert metrics["timing_s/gen"] + 0.001 <= metrics["timing_s/step"]


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    batch = make_batch([1.0], [3], ["stop"])
    batch.answer = ["\ud800"] * len(batch)
    write_samples(batch, tmp_path / "samples.jsonl")
    assert json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])["answer"] == "\ud800"
