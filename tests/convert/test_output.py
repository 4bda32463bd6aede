"""What a conversion may not touch, and outputs that cannot be: nothing is lost, nothing looks complete."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.convert.command import FILE, QWEN3, convert, edited, make_model

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", QWEN3)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("where", ["same", "inside"])
def test_restart_never_deletes_the_source(model: Path, tmp_path: Path, where: str) -> None:
    source = tmp_path / "z.partial" if where == "same" else tmp_path / "z.partial" / "model"
    shutil.copytree(model, source)
    before = files(source)
    done = convert("export", source, tmp_path / "z", "--restart")
    assert done.code == 2
    assert "choose an output folder elsewhere" in done.err
    assert files(source) == before


def test_restart_deletes_only_what_a_conversion_wrote(model: Path, tmp_path: Path) -> None:
    mine = tmp_path / "z.partial" / "thesis.tex"
    mine.parent.mkdir()
    mine.write_text("chapter one")
    for journal in (None, "null\n", '{"x": 1}\n'):
        if journal is not None:
            (tmp_path / "z.partial.journal").write_text(journal)
        for restart in ((), ("--restart",)):
            done = convert("export", model, tmp_path / "z", *restart)
            assert done.code == 2, done.err
            assert mine.read_text() == "chapter one"
    assert not (tmp_path / "z").exists()


def test_an_output_inside_of_the_reference_is_refused(model: Path, tmp_path: Path) -> None:
    reference = shutil.copytree(model, tmp_path / "reference")
    assert convert("import", model, tmp_path / "dist", "--quiet").code == 0
    done = convert("export", tmp_path / "dist", reference / "out", "--reference", reference)
    assert done.code == 2
    assert f"inside of the source {reference}" in done.err
    assert files(reference) == files(model)


def test_a_changed_file_of_an_earlier_run_is_written_again_and_junk_is_not_published(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the disk must still have the hash that the journal noted."""
    from grpo_mlm.convert import job

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "publish", stop)
    assert convert("export", model, tmp_path / "out", "--quiet").code == 130
    monkeypatch.undo()
    partial = tmp_path / "out.partial"
    content = bytearray((partial / FILE).read_bytes())
    content[-8:] = bytes(8)
    (partial / FILE).write_bytes(content)
    (partial / "modeling_evil.py").write_text("raise SystemExit")
    done = convert("export", model, tmp_path / "out", "--quiet")
    assert done.code == 0, done.err
    assert not (tmp_path / "out" / "modeling_evil.py").exists()
    before, after = load_file(model / FILE), load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "line", ['{"file": "x"}', "5", "[" * 5000, '{"file": "x", "bytes": 1, "sha256": "", "z": 2}']
)
def test_a_damaged_journal_is_named(model: Path, tmp_path: Path, line: str) -> None:
    from grpo_mlm.convert import job

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "publish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert convert("export", model, tmp_path / "out", "--quiet").code == 130
    journal = tmp_path / "out.partial.journal"
    journal.write_text(journal.read_text() + line + "\n")
    done = convert("export", model, tmp_path / "out", "--quiet")
    assert done.code == 2
    assert "out.partial.journal is damaged" in done.err
    assert "--restart" in done.err
    assert convert("export", model, tmp_path / "out", "--quiet", "--restart").code == 0


def test_a_value_that_the_dtype_cannot_hold_is_refused(model: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM][0] = 1e9
        tensors[NORM][1] = torch.inf  # as it is in the source, it stays

    large = edited(model, tmp_path / "large", edit=edit)
    done = convert("export", large, tmp_path / "out", "--dtype", "float16")
    assert done.code == 2
    assert f"{NORM} holds 1e+09, which float16 cannot hold" in done.err
    assert not (tmp_path / "out").exists()
    assert convert("export", large, tmp_path / "out", "--dtype", "bfloat16", "--restart").code == 0


def test_a_full_check_of_one_half_precision_from_the_other_passes(model: Path, tmp_path: Path) -> None:
    half = tmp_path / "half"
    assert convert("export", model, half, "--dtype", "float16", "--quiet").code == 0
    done = convert("export", half, tmp_path / "out", "--dtype", "bfloat16", "--verify", "full")
    assert done.code == 0, done.err


def test_nothing_left_is_no_checkpoint(model: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(model / "config.json", empty)
    from safetensors.torch import save_file

    save_file({}, empty / FILE)
    done = convert("export", empty, tmp_path / "out", "--allow-missing", "*")
    assert done.code == 2
    assert "no tensor is left" in done.err
    assert not (tmp_path / "out").exists()


def test_outputs_that_cannot_be_are_refused_before_any_work(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "taken.partial").write_text("")
    for out, said in (
        (tmp_path / "file" / "out", "File exists"),
        (tmp_path / "link", "is a link"),
        (tmp_path / "loop", "is a link"),
        (tmp_path / "loop" / "out", "File exists"),
        (tmp_path / ("x" * 250), "too long a name"),
        (tmp_path / "taken", "taken.partial is a file"),
        (Path("/dev/shm"), "is a mount point"),
    ):
        done = convert("export", model, out)
        assert done.code == 2, (out, done.err)
        assert said in done.err, (out, done.err)
        assert "Traceback" not in done.err


def test_a_file_size_limit_is_a_lack_of_disk(model: Path, tmp_path: Path) -> None:
    """In a process of its own, for the limit cannot be raised again. Afterwards the same command goes on."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))

    command = [sys.executable, "-m", "tools.checkpoint_convert", "export", str(model), str(tmp_path / "out")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, preexec_fn=limit, capture_output=True, text=True, check=False, env=environment, timeout=120
    )
    assert done.returncode == 5, done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert convert("export", model, tmp_path / "out", "--verify", "full").code == 0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1" + "0" * 400])
def test_numbers_of_the_config_are_finite(model: Path, tmp_path: Path, number: str) -> None:
    odd = shutil.copytree(model, tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    config["rms_norm_eps"] = "NUMBER"
    (odd / "config.json").write_text(json.dumps(config).replace('"NUMBER"', number))
    done = convert("plan", odd, "dist")
    assert done.code == 2
    assert "rms_norm_eps is" in done.err


def test_a_tensor_that_a_checkpoint_lacks_is_allowed_by_either_of_its_names(
    model: Path, tmp_path: Path
) -> None:
    """By plan, conversion, its check and verify alike, from both formats."""
    from safetensors.torch import save_file

    lacking = shutil.copytree(model, tmp_path / "lacking")
    tensors = load_file(lacking / FILE)
    del tensors[NORM]
    save_file(tensors, lacking / FILE, metadata={"format": "pt"})
    dist = tmp_path / "dist"
    allowed = ("--allow-missing", NORM)
    done = convert("import", lacking, dist, *allowed, "--verify", "full")
    assert done.code == 0, done.err
    for pattern in (NORM, "decoder.final_layernorm.*"):
        for number, command in enumerate(
            (("export", dist, tmp_path / f"out {pattern}"), ("plan", dist, "hf"))
        ):
            done = convert(*command, "--allow-missing", pattern)
            assert done.code == 0, (number, done.err)
        assert convert("verify", lacking, dist, "--allow-missing", NORM).code == 0
    done = convert("plan", dist, "hf")
    assert done.code == 3
    assert "1 tensors missing, 0 unexpected" in done.err
