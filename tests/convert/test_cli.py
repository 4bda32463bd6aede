"""The commands from end to end: results, exit codes, and one clear error for each mistake."""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.command import FILE, LLAMA, QWEN3, QWEN3_MOE, convert, edited, make_model

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def checkpoint(model: Path) -> Path:
    out = model.with_name("qwen3-megatron")
    assert convert("import", model, out, "--quiet").code == 0
    return out


@pytest.mark.parametrize("config", [QWEN3, LLAMA, QWEN3_MOE], ids=lambda config: config["model_type"])
def test_there_and_back_is_bit_for_bit(config: dict, tmp_path: Path) -> None:
    source = make_model(tmp_path / "model", config)
    done = convert("import", source, tmp_path / "megatron", "--verify", "full")
    assert done.code == 0, done.err
    assert "every tensor compared with the source" in done.out
    done = convert("export", tmp_path / "megatron", tmp_path / "again", "--verify", "hash")
    assert done.code == 0, done.err
    before, after = load_file(source / FILE), load_file(tmp_path / "again" / FILE)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (source / "config.json").read_bytes() == (tmp_path / "again" / "config.json").read_bytes()
    assert convert("verify", source, tmp_path / "megatron").code == 0


def test_results_as_json(model: Path, tmp_path: Path) -> None:
    done = convert(
        "export", model, tmp_path / "out", "--dtype", "bfloat16", "--max-shard-size", "16KB", "--json"
    )
    assert done.code == 0, done.err
    elements = sum(tensor.numel() for tensor in load_file(model / FILE).values())
    assert done.json["bytes"] == 2 * elements
    assert done.json["files"] == len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert done.json["out"] == str(tmp_path / "out")
    assert done.json["verified"] == "none"
    assert done.json["changes"] == ["config.json: dtype float32 -> bfloat16"]


def test_quiet_prints_nothing(model: Path, tmp_path: Path) -> None:
    done = convert("import", model, tmp_path / "out", "--quiet", "--verify", "full")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = convert("verify", model, tmp_path / "out", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_full_check_of_a_rounded_copy_passes(model: Path, tmp_path: Path) -> None:
    assert convert("import", model, tmp_path / "out", "--dtype", "bfloat16", "--verify", "full").code == 0


def test_hash_check_finds_a_flipped_bit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that does not keep what was written: the file changes between writing and checking."""
    from grpo_mlm.convert import check

    out = tmp_path / "out"

    def spoil(*args: object) -> None:
        folder = Path(str(args[2]))
        content = bytearray((folder / FILE).read_bytes())
        content[-1] ^= 1
        (folder / FILE).write_bytes(content)
        checked(*args)  # type: ignore[arg-type]

    checked = check.check_output
    monkeypatch.setattr(check, "check_output", spoil)
    done = convert("export", model, out, "--verify", "hash")
    assert done.code == 4
    assert str(tmp_path / "out.partial" / FILE) in done.err
    assert not out.exists()  # nothing that looks complete
    monkeypatch.undo()
    done = convert("export", model, out, "--verify", "full")  # the spoilt file is written again
    assert done.code == 0, done.err
    assert not (tmp_path / "out.partial").exists()


def test_missing_and_unexpected_names_are_3(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.strange.weight"] = tensors.pop(Q_PROJ)

    odd = edited(model, tmp_path / "odd", edit=edit)
    for command in ("import", "export"):
        done = convert(command, odd, tmp_path / "out")
        assert done.code == 3
        assert Q_PROJ in done.err
        assert "model.layers.0.strange.weight" in done.err
    assert not (tmp_path / "out").exists()
    allowed = ("--allow-missing", Q_PROJ, "--allow-missing", "*.strange.*")
    done = convert("export", odd, tmp_path / "out", *allowed, "--json")
    assert done.code == 0, done.err
    assert sorted(done.json["skipped"]) == [Q_PROJ, "model.layers.0.strange.weight"]


def test_too_little_memory_is_5(model: Path, tmp_path: Path) -> None:
    done = convert("import", model, tmp_path / "out", "--memory-limit", "100B")
    assert done.code == 5
    assert "--memory-limit" in done.err
    assert convert("plan", model, "dist", "--memory-limit", "100B").code == 5


def test_too_little_disk_is_5(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.total, 10))
    done = convert("import", model, tmp_path / "out")
    assert done.code == 5
    assert "10 left" in done.err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    for command in ("import", "export"):
        done = convert(command, model, out)
        assert done.code == 2
        assert str(out) in done.err
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("import", "/nowhere/at all", "out"), "/nowhere/at all"),
        (("import", "{model}", "out", "--memory-limit", "4"), "--memory-limit '4'"),
        (("export", "{model}", "out", "--max-shard-size", "5G"), "5GB or 512MiB"),
        (("export", "{model}", "out", "--dtype", "fp8"), "expected keep, bfloat16, float16, float32"),
        (("export", "{model}", "out", "--verify", "some"), "expected none, hash, full"),
        (("export", "{model}", "out", "--workers", "0"), "--workers"),
        (("export", "{model}", "out", "--shard", "5GB"), "--shard"),
        (("export", "{model}"), "DST"),
        (("plan", "{model}"), "TARGET"),
        (("plan", "{model}", "hf", "--tensors", "--summary"), "exclude each other"),
        (("plan", "{model}", "hf", "--disk-speed", "fast"), "--disk-speed 'fast'"),
        (("verify", "{model}", "/nowhere/at all"), "/nowhere/at all"),
        (("verify", "{model}", "{model}", "--memory-limit", "0GB"), "--memory-limit '0GB'"),
        (("plam", "{model}"), "plam"),
    ],
)
def test_mistakes_are_2_and_name_what_is_wrong(
    args: tuple[str, ...], said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = convert(*(arg.format(model=model) for arg in args))
    assert done.code == 2, done.err
    assert said in done.err.replace("\n", " ")
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_remote_code_is_refused_unless_allowed(model: Path, tmp_path: Path) -> None:
    odd = edited(model, tmp_path / "odd", auto_map={"AutoModel": "modeling.Model"})
    (odd / "modeling.py").write_text("raise SystemExit('run')\n")
    for args in (("plan", odd, "hf"), ("import", odd, tmp_path / "out"), ("verify", odd, model)):
        done = convert(*args)
        assert done.code == 2
        assert "auto_map" in done.err
    assert convert("export", odd, tmp_path / "out", "--trust-remote-code").code == 0
    assert (tmp_path / "out" / "modeling.py").read_text() == "raise SystemExit('run')\n"


def test_a_checkpoint_without_its_config_needs_a_reference(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=shutil.ignore_patterns("hf"))
    for args in (("export", bare, tmp_path / "out"), ("verify", model, bare), ("plan", bare, "hf")):
        done = convert(*args)
        assert done.code == 2
        assert "--reference" in done.err
        assert convert(*args, "--reference", model).code == 0


def test_an_interrupted_conversion_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after the first of many files: 130, then only the others are written."""
    from grpo_mlm.convert.journal import Journal

    out = tmp_path / "out"
    args = ("export", model, out, "--max-shard-size", "16KB", "--workers", "1")

    def note(journal: Journal, record: object) -> None:
        noted(journal, record)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    noted = Journal.add
    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", note)
        done = convert(*args)
    assert done.code == 130
    assert f"{out}.partial" in done.err
    assert "interrupted" in done.err
    assert not out.exists()
    done = convert(*args)
    assert done.code == 0, done.err
    assert "done by an earlier run" in done.err
    assert convert("verify", model, out).code == 0


def test_restart_begins_anew(model: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "left.txt").write_text("over")
    noted = {"file": "left.txt", "bytes": 4, "sha256": sha256(b"over").hexdigest()}
    (tmp_path / "out.partial.journal").write_text('{"job": "another"}\n' + json.dumps(noted) + "\n")
    done = convert("export", model, tmp_path / "out")
    assert done.code == 2
    assert "--restart" in done.err
    assert convert("export", model, tmp_path / "out", "--restart").code == 0
    assert not partial.exists()
    assert not (tmp_path / "out" / "left.txt").exists()


@pytest.mark.parametrize("name", ["[red]model[/red]", "model [/] 1", "модель"])
def test_brackets_and_letters_in_names_are_printed_as_they_are(name: str, tmp_path: Path) -> None:
    source = make_model(tmp_path / name)
    assert str(source) in convert("plan", source, "hf").out
    done = convert("import", source, source)
    assert done.code == 2
    assert str(source) in done.err


def test_names_cannot_steer_the_terminal(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["\x1b[2J[bold]evil[/bold]"] = torch.zeros(1)

    odd = edited(model, tmp_path / "odd", edit=edit)
    for args in (("plan", odd, "hf"), ("import", odd, tmp_path / "out")):
        done = convert(*args)
        assert done.code == 3
        assert "\x1b" not in done.out + done.err
        assert "\\x1b[2J[bold]evil[/bold]" in done.out + done.err


def test_the_manifest_says_what_was_done(model: Path, tmp_path: Path) -> None:
    convert("export", model, tmp_path / "out", "--dtype", "float16")
    manifest = json.loads((tmp_path / "out" / "conversion_manifest.json").read_text())
    assert manifest["options"]["dtype"] == "float16"
    assert manifest["files"].keys() == {FILE}
