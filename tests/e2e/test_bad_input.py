"""A user's mistakes: exit code 2 and one clear error before any process starts; failures: 1 and the cause."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.command import COMMAND, CONFIGS, grpo_mlm, processes_of, train

TINY = str(CONFIGS / "tiny_dp2.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from grpo_mlm.small_models.tiny import make_qwen3

    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_qwen3(folder)
    return folder


def refused(*overrides: str) -> str:
    done = grpo_mlm("train", TINY, "--dry-run", *overrides)
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout
    return done.stdout


def test_dry_run_shows_the_layout_and_exits() -> None:
    done = grpo_mlm("train", TINY, "--dry-run")
    assert done.returncode == 0, done.stdout
    assert "DP2" in done.stdout
    assert "32 train, 8 validation" in done.stdout


def test_a_misspelt_key_names_the_nearest() -> None:
    assert "data.max_response_length" in refused("data.max_respone_length=3")


def test_a_missing_model_folder() -> None:
    assert "/nowhere/model" in refused("model.path=/nowhere/model", "model.maker=null")


def test_a_missing_weight_file(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    assert "safetensors" in refused(f"model.path={broken}")


def test_chat_rows_need_a_chat_template(model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "model"
    shutil.copytree(model, bare)
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    assert "chat template" in refused(f"model.path={bare}")


def test_a_row_that_does_not_parse_names_file_and_line(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n')
    output = refused(f"data.train_files={rows}").replace("\n", "")
    assert "rows.jsonl" in output
    assert "2" in output


def test_a_missing_column_lists_those_present(tmp_path: Path) -> None:
    """DAT-06."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n' * 16)
    output = refused(f"data.train_files={rows}")
    assert "prompt" in output
    assert "question" in output


def test_too_few_devices_name_both_numbers() -> None:
    output = refused("cluster.n_devices_per_node=1")
    assert "2 devices asked" in output
    assert "1 there" in output


def test_an_unknown_reward_function() -> None:
    refused("reward.functions=[{name: 'grpo_mlm.nothing:here'}]")


def test_a_missing_config_file_and_a_missing_command() -> None:
    assert grpo_mlm("train", "/nowhere.yaml").returncode == 2
    assert grpo_mlm("trian").returncode == 2


@pytest.mark.slow
def test_a_reward_that_raises_stops_the_run_with_its_message(tmp_path: Path) -> None:
    (tmp_path / "my_reward.py").write_text("def score(sample):\n    raise KeyError('no such field: gold')\n")
    overrides = (
        f"reward.functions=[{{name: '{tmp_path}/my_reward.py:score'}}]",
        "trainer.val_before_train=false",
        "actor.megatron.data_parallel_size=1",
        "rollout.num_engines=1",
    )
    run = train("tiny_dp2.yaml", tmp_path / "run", *overrides)
    assert run.code == 1, run.output
    assert "max_invalid_fraction" in run.output
    assert "no such field" in run.output
    assert processes_of(run.folder) == []


@pytest.mark.slow
def test_an_engine_that_cannot_start_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    run = train("tiny_dp2.yaml", tmp_path / "run", "rollout.kv_cache_gb=0.000001", "rollout.num_engines=1")
    assert run.code == 1, run.output
    assert "engine-0" in run.output
    assert processes_of(run.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_leaves_no_process(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    folder = tmp_path / "run"
    args = ["train", TINY, f"run.dir={folder}", "trainer.total_training_steps=1000"]
    process = subprocess.Popen([COMMAND, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (folder / "samples" / "step_1.jsonl").exists():
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):  # still running
            process.wait(0.2)
    process.send_signal(sent)
    assert process.wait(60) == code
    assert processes_of(folder) == []
