"""Files, inheritance, overrides, and the errors of each: CFG-01."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_mlm.config import Config, dump_config, load_config
from grpo_mlm.errors import UserError

from .conftest import SMALLEST

Load = Callable[..., Config]
Refusal = Callable[..., str]


def error_of(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(path, list(overrides))
    return str(caught.value)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Values


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E-6", 1e-6), ("1.e-6", 1e-6), ("2", 2.0), ("0.5", 0.5), (".5", 0.5), ("+3e-4", 3e-4)],
)
def test_numbers_arrive_as_numbers(load: Load, text: str, value: float) -> None:
    assert load(f"actor.optim.lr={text}").actor.optim.lr == value


def test_numbers_in_files_arrive_as_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", SMALLEST + "actor:\n  optim:\n    lr: 1e-6\n    eps: 1e-8\n")
    optim = load_config(path).actor.optim
    assert (optim.lr, optim.eps) == (1e-6, 1e-8)


def test_leading_zeros_are_decimal(load: Load) -> None:
    assert load("run.seed=010").run.seed == 10


def test_words_that_yaml_1_1_takes_for_booleans_are_strings(load: Load) -> None:
    assert load("data.answer_key=no").data.answer_key == "no"
    assert load("rollout.stop=[on, Yes]").rollout.stop == ["on", "Yes"]


def test_dates_and_clock_times_are_strings(load: Load) -> None:
    assert load("run.name=2025-01-02").run.name == "2025-01-02"
    assert load("data.answer_key=12:30").data.answer_key == "12:30"


def test_booleans_and_null_in_overrides(load: Load) -> None:
    config = load("data.shuffle=false", "actor.clip_ratio_c=null", "trainer.total_training_steps=")
    assert config.data.shuffle is False
    assert config.actor.clip_ratio_c is None
    assert config.trainer.total_training_steps is None


def test_lists_and_groups_in_overrides_are_yaml(load: Load) -> None:
    config = load('rollout.stop=["x", "\\n"]', "data.chat_template_kwargs={enable_thinking: false}")
    assert config.rollout.stop == ["x", "\n"]
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data.train_files", "a.jsonl"),
        ("data.val_files", "b.parquet"),
        ("rollout.stop", "</s>"),
        ("trainer.logger", "console"),
    ],
)
def test_one_string_stands_for_a_list_of_one(load: Load, key: str, value: str) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load(f"{key}={value}"), section), name) == [value]


def test_an_override_value_may_hold_equals_signs(load: Load) -> None:
    source = "reasoning_gym:chain_sum?size=10&seed=1"
    assert load(f"data.train_files={source}").data.train_files == [source]


def test_the_last_of_two_overrides_counts(load: Load) -> None:
    assert load("rollout.n=2", "rollout.n=4").rollout.n == 4


def test_an_override_replaces_a_list_element_by_position(load: Load) -> None:
    config = load("reward.functions.0.weight=0.5", "reward.functions.0.kwargs.ignore_case=true")
    function = config.reward.functions[0]
    assert (function.name, function.weight, function.kwargs) == ("exact_match", 0.5, {"ignore_case": True})


def test_home_is_expanded_and_variables_are_not(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PLACE", "elsewhere")
    config = load(
        "model.path=~/m", "run.dir=~/r", "data.train_files=~/t.jsonl", "data.val_files=[$PLACE/v.jsonl]"
    )
    assert config.model.path == "/home/someone/m"
    assert config.run.dir == Path("/home/someone/r")
    assert config.data.train_files == ["/home/someone/t.jsonl"]
    assert config.data.val_files == ["$PLACE/v.jsonl"]


def test_a_loaded_config_cannot_be_changed(load: Load) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load().rollout.n = 3  # type: ignore[misc]


# Inheritance


def test_base_is_merged_key_by_key_through_several_files(tmp_path: Path) -> None:
    write(
        tmp_path / "root.yaml",
        SMALLEST + "actor: {max_tokens_per_gpu: 5000, optim: {lr: 1e-3, beta1: 0.8}}\n",
    )
    (tmp_path / "sub").mkdir()
    write(tmp_path / "sub" / "mid.yaml", "base: ../root.yaml\nactor: {optim: {lr: 1e-4}}\n")
    path = write(tmp_path / "top.yaml", "base: sub/mid.yaml\ndata: {train_files: [c.jsonl]}\n")
    config = load_config(path, ["actor.optim.beta2=0.9"])
    assert (config.actor.max_tokens_per_gpu, config.actor.optim.lr, config.actor.optim.beta1) == (
        5000,
        1e-4,
        0.8,
    )
    assert config.actor.optim.beta2 == 0.9
    assert config.data.train_files == ["c.jsonl"]  # a list replaces a list
    assert config.data.val_files == ["b.jsonl"]


def test_files_that_include_each_other_are_an_error(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    write(a, "base: b.yaml\n")
    write(b, "base: a.yaml\n")
    assert f"{a} -> {b} -> {a}" in error_of(a)


def test_a_missing_base_names_both_files(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "base: gone.yaml\n")
    message = error_of(path)
    assert str(tmp_path / "gone.yaml") in message
    assert str(path) in message


def test_base_must_be_one_name(tmp_path: Path) -> None:
    assert "base: ['x.yaml'], expected the name of one file" in error_of(
        write(tmp_path / "a.yaml", "base: [x.yaml]")
    )


# Writing


def test_a_dumped_config_loads_back_equal(load: Load, tmp_path: Path) -> None:
    config = load(
        "actor.optim.lr=1e-6",
        "actor.clip_ratio_c=null",
        "run.dir=~/somewhere",
        'run.name="1e-6"',
        'rollout.stop=["1e6", "null", "true", "~", "a: b", "\\n", "é", "# x", "0x1", "1_000", "yes", ".5", " "]',
        "reward.functions.0.kwargs={a: 1.5, b: [1e30, -0.0, null, {c: 'on'}], d: '12'}",
        'data.system_prompt="two\\nlines: of text   with spaces \\u263a"',
    )  # fmt: skip
    again = load_config(write(tmp_path / "again.yaml", dump_config(config)))
    assert again == config
    assert again.run.name == "1e-6"


def test_a_dumped_config_holds_every_key(load: Load) -> None:
    text = dump_config(load())
    assert "clip_ratio_high: 0.2" in text
    assert "tensor_model_parallel_size: 1" in text


# Errors: keys


@pytest.mark.parametrize(
    ("override", "path", "suggestion"),
    [
        ("algo.kl_coeff=0.1", "algo.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("actor.lr=1e-6", "actor.lr", "actor.optim.lr"),
        ("actor.optim.optim.lr=1e-6", "actor.optim.optim.lr", "actor.optim.lr"),
        ("data.max_respone_length=5", "data.max_respone_length", "data.max_response_length"),
        ("rollout.max_response_length=5", "rollout.max_response_length", "data.max_response_length"),
        ("rolout.n=4", "rolout.n", "rollout.n"),
        ("max_prompt_length=4", "max_prompt_length", "data.max_prompt_length"),
        ("reward.functions.0.wieght=2", "reward.functions.0.wieght", "reward.functions.0.weight"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(
    refusal: Refusal, override: str, path: str, suggestion: str
) -> None:
    assert f"{path}: unknown key; did you mean {suggestion}?" in refusal(override)


def test_an_unknown_key_like_no_other_is_answered_with_the_keys_there(refusal: Refusal) -> None:
    message = refusal("bridge.zzzzzz=1")
    assert "bridge.zzzzzz: unknown key; known here: bucket_mb" in message


def test_every_key_of_an_unknown_group_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", SMALLEST + "actro:\n  optim: {lr: 1e-6}\n  use_kl_loss: true\n")
    message = error_of(path)
    assert "actro.optim.lr: unknown key; did you mean actor.optim.lr?" in message
    assert "actro.use_kl_loss: unknown key; did you mean actor.use_kl_loss?" in message


def test_duplicate_keys_are_errors_with_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "rollout:\n  n: 4\n  temperature: 1\n  n: 8\nrollout: {}\n")
    message = error_of(path)
    assert "line 4: rollout.n is a duplicate of line 2" in message
    assert "line 5: rollout is a duplicate of line 1" in message


def test_a_missing_key_is_named_with_its_documentation(tmp_path: Path) -> None:
    message = error_of(write(tmp_path / "a.yaml", ""))
    assert "3 problems" in message
    for section in ("model", "data", "reward"):
        assert f"\n  {section}: missing" in message
    message = error_of(write(tmp_path / "b.yaml", SMALLEST.replace("path: some/folder", "maker: a:b")))
    assert "model.path: missing. Folder in Hugging Face format, or a hub id." in message


# Errors: values


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("rollout.n=eight", 'rollout.n: "eight", expected a whole number'),
        ("rollout.n=2.5", "rollout.n: 2.5, expected a whole number"),
        ("rollout.n=8.0", "rollout.n: 8.0, expected a whole number"),
        ("rollout.n=true", "rollout.n: true, expected a whole number"),
        ("rollout.n=0", "rollout.n: 0, expected >= 1"),
        ("actor.optim.lr=fast", 'actor.optim.lr: "fast", expected a number'),
        ("actor.optim.lr=-1e-6", "actor.optim.lr: -1e-06, expected > 0"),
        ("actor.optim.lr=.inf", "actor.optim.lr: Infinity, expected a finite number"),
        ("actor.optim.beta1=1.0", "actor.optim.beta1: 1.0, expected < 1"),
        ("rollout.top_p=1.5", "rollout.top_p: 1.5, expected <= 1"),
        ("data.shuffle=yes", 'data.shuffle: "yes", expected true or false'),
        ("data.shuffle=1", "data.shuffle: 1, expected true or false"),
        ("run.name=7", "run.name: 7, expected a string (in quotes)"),
        ("run.dir=7", "run.dir: 7, expected a path"),
        ("data.train_files=[]", "data.train_files: [], expected at least one entry"),
        ("data.train_files=7", "data.train_files: 7, expected a list"),
        ("data.train_files=[1]", "data.train_files.0: 1, expected a string (in quotes)"),
        ("actor=3", "actor: 3, expected a group of keys"),
        ("actor=null", "actor: null, expected a group of keys"),
        ("reward.functions.0.kwargs=[1]", "reward.functions.0.kwargs: [1], expected a group of keys"),
        ("run.seed=-1", "run.seed: -1, expected >= 0"),
    ],
)
def test_a_wrong_value_is_named_with_what_was_expected(
    refusal: Refusal, override: str, expected: str
) -> None:
    assert expected in refusal(override)


def test_a_wrong_choice_lists_the_choices_and_the_nearest(refusal: Refusal) -> None:
    message = refusal("actor.loss_agg_mode=token_mean")
    assert 'actor.loss_agg_mode: "token_mean", expected' in message
    assert "seq-mean-token-sum-norm" in message
    assert message.endswith("did you mean token-mean?")


def test_every_problem_is_in_one_error(refusal: Refusal) -> None:
    message = refusal("rollout.n=eight", "actor.lrr=1", "data.shuffle=maybe")
    assert "3 problems" in message
    for path in ("rollout.n: ", "actor.lrr: ", "data.shuffle: "):
        assert len(re.findall(rf"^  {re.escape(path)}", message, re.MULTILINE)) == 1


def test_a_long_value_is_cut_short(refusal: Refusal) -> None:
    assert len(refusal("rollout.n=" + "x" * 5000)) < 300


# Errors: command line and files


@pytest.mark.parametrize("override", ["rollout.n", "=3", "--rollout.n"])
def test_an_override_without_key_or_value_is_an_error(refusal: Refusal, override: str) -> None:
    assert f"{override!r}: expected key=value" in refusal(override)


def test_an_override_that_is_not_yaml_is_an_error(refusal: Refusal) -> None:
    message = refusal("rollout.stop=[")
    assert "rollout.stop=[" in message
    assert "not valid YAML" in message


def test_an_override_below_a_value_is_an_error(refusal: Refusal) -> None:
    assert "there is no key 'x' below the value 'some/folder'" in refusal("model.path.x=1")


def test_an_override_of_a_place_that_a_list_lacks_is_an_error(refusal: Refusal) -> None:
    assert "'3' is not a position in a list of 1" in refusal("reward.functions.3.weight=1")


def test_all_bad_overrides_are_in_one_error(refusal: Refusal) -> None:
    message = refusal("rollout.n", "rollout.stop=[")
    assert "command line: 2 problems" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1, 2", "line 1"),
        ("model:\n  path: x\n bad: y\n", "line 3"),
        ("a: b\n---\nc: d\n", "line 2"),
        ("model: !!python/object/apply:os.getcwd []", "line 1"),
        ("a: &x {b: *x}", "aliases (*name) are not supported"),
        ("- a\n- b\n", "expected groups of keys, found a list"),
        ("a: \x00", "not valid YAML"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("rollout: {n: !!int many}", "not valid YAML"),
        ("rollout: {n: !!bool many}", "not valid YAML"),
        ("rollout: {n: !!timestamp many}", "not valid YAML"),
    ],
)
def test_a_file_that_is_not_one_group_of_keys_is_an_error(tmp_path: Path, text: str, expected: str) -> None:
    path = write(tmp_path / "a.yaml", text)
    message = error_of(path)
    assert expected in message
    assert str(path) in message


def test_a_missing_file_a_folder_and_binary_are_errors(tmp_path: Path) -> None:
    assert "No such file" in error_of(tmp_path / "gone.yaml")
    assert "Is a directory" in error_of(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in error_of(tmp_path / "b.yaml")
    (tmp_path / "c.yaml").symlink_to(tmp_path / "c.yaml")
    assert "c.yaml" in error_of(tmp_path / "c.yaml")
    assert "base of" in error_of(write(tmp_path / "d.yaml", "base: ~nosuchuser/x.yaml"))
    assert "not a path" in error_of(write(tmp_path / "e.yaml", 'base: "a\\0b"'))


def test_a_home_that_nobody_has_stays_as_written(load: Load) -> None:
    assert load("run.dir=~nosuchuser/x").run.dir == Path("~nosuchuser/x")


def test_keys_must_be_strings(tmp_path: Path) -> None:
    message = error_of(write(tmp_path / "a.yaml", SMALLEST + "1: x\nbridge: {2: 3}\n"))
    assert "\n  1: " in message
    assert "\n  bridge.2: " in message
