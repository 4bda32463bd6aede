"""Conversions that are killed, interrupted, or in the way of another: nothing looks complete, and work is kept."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_mlm.convert.job import convert
from grpo_mlm.convert.journal import Journal
from grpo_mlm.convert.options import Options, Silent
from grpo_mlm.convert.target import Format
from grpo_mlm.errors import RunFailure, UserError
from tests.convert.models import Told, assert_same_weights, contents, make_model

OPTIONS = Options(max_shard_size=20_000, memory_limit=30_000)  # many files, many blocks
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.convert.test_resume"])


def convert_until(operation: int, source: Path, out: Path, output: Format) -> None:
    """Convert, and be killed as if by `kill -9` right before so many operations on files are done."""
    left = itertools.count(operation, -1)

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.rename", "os.remove", "os.mkdir") and str(out) in str(args[0])
        if touches and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    convert(source, out, output, OPTIONS, Silent())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("source") / "hf", "qwen3", tie_word_embeddings=False)


@pytest.mark.slow
@pytest.mark.parametrize("output", ["torch_dist", "hf"])
def test_killed_at_any_point_it_goes_on_and_ends_the_same(
    tmp_path: Path, source: Path, output: Format
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    convert(source, whole, output, OPTIONS, Silent())
    ends: list[int | None] = []
    while not out.exists():  # each run gets a little further before it is killed
        arguments = (1 + 3 * len(ends), source, out, output)
        process = PROCESSES.Process(target=convert_until, args=arguments)
        process.start()
        process.join(60)
        ends.append(process.exitcode)
    assert set(ends[:-1]) == {-signal.SIGKILL}
    assert len(ends) > 5
    assert contents(out) == contents(whole)  # at no time was anything there that is not whole
    assert not (tmp_path / "out.partial").exists()


def test_what_is_done_is_not_written_again(tmp_path: Path, source: Path) -> None:
    interrupted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = {path.name: path.stat() for path in (tmp_path / "out.partial").glob("*.safetensors")}
    assert len(done) > 2
    told = Told()
    convert(source, tmp_path / "out", "hf", OPTIONS, told)
    assert told.done == told.total
    assert_same_weights(tmp_path / "out", source)
    for name, before in done.items():
        after = (tmp_path / "out" / name).stat()
        assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


class EndHalfway(Told):
    """Progress that ends the conversion like Ctrl-C, or as a handler of SIGTERM does."""

    def __init__(self, end: type[BaseException]) -> None:
        super().__init__()
        self.end = end

    def start(self, total: int, done: int) -> None:
        super().start(total, done)
        if done > 0:
            raise self.end

    def advance(self, n: int) -> None:
        super().advance(n)
        if self.done > self.total // 2:
            raise self.end


def interrupted(source: Path, out: Path, end: type[BaseException] = KeyboardInterrupt) -> list[str]:
    """Convert half of it; what the user was told."""
    told = EndHalfway(end)
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, "hf", OPTIONS, told)
    return told.lines


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_an_interruption_says_that_it_can_go_on(
    tmp_path: Path, source: Path, end: type[BaseException]
) -> None:
    before = threading.active_count()
    for _ in range(2):  # a worker's thread, then the main one
        assert "interrupted; the same command goes on" in interrupted(source, tmp_path / "out", end)[-1]
        assert threading.active_count() == before
    convert(source, tmp_path / "out", "hf", OPTIONS, Silent())


def test_another_jobs_leftovers_are_refused_unless_told_to_restart(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    interrupted(source, out)
    other = Options(max_shard_size=30_000)
    with pytest.raises(UserError, match=r"out\.partial holds files of another conversion.*--restart"):
        convert(source, out, "hf", other, Silent())
    with pytest.raises(UserError, match="--restart"):
        convert(source, out, "torch_dist", OPTIONS, Silent())
    convert(source, out, "hf", Options(max_shard_size=30_000, restart=True), Silent())
    assert_same_weights(out, source)


def test_a_source_that_changed_is_another_job(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "llama")
    interrupted(source, tmp_path / "out")
    tensors = load_file(source / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, source / "model.safetensors")
    with pytest.raises(UserError, match="--restart"):
        convert(source, tmp_path / "out", "hf", OPTIONS, Silent())


def test_a_strangers_folder_is_not_touched(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="no conversion is known to have written"):
        convert(source, tmp_path / "out", "hf", OPTIONS, Silent())
    assert (tmp_path / "out.partial" / "thesis.txt").read_text() == "mine"


def test_a_cut_line_and_a_cut_file_are_done_again(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "whole", "hf", OPTIONS, Silent())
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    interrupted(source, out)
    journal = tmp_path / "out.partial.journal"
    lines = journal.read_bytes()
    assert lines.count(b"\n") > 3
    journal.write_bytes(lines[:-7])
    cut = sorted(partial.glob("*.safetensors"))[0]
    cut.write_bytes(cut.read_bytes()[:-1])
    convert(source, out, "hf", OPTIONS, Silent())
    assert contents(out) == contents(tmp_path / "whole")


def test_a_second_process_is_kept_away(tmp_path: Path, source: Path) -> None:
    with (
        Journal(tmp_path / "out.partial", "a job"),
        pytest.raises(UserError, match="another process is converting"),
    ):
        convert(source, tmp_path / "out", "hf", OPTIONS, Silent())


def test_an_error_in_one_worker_ends_all(tmp_path: Path) -> None:
    """A file that shrinks while it is read."""
    source = make_model(tmp_path / "hf", "llama")

    class Shrink(Told):
        def start(self, total: int, done: int) -> None:
            os.truncate(source / "model.safetensors", 30_000)

    before = threading.active_count()
    with pytest.raises(UserError, match=r"model\.safetensors was cut short while it was read"):
        convert(source, tmp_path / "out", "hf", OPTIONS, Shrink())
    assert threading.active_count() == before
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_under_way_is_not_published(tmp_path: Path) -> None:
    source = make_model(tmp_path / "hf", "llama")

    class Touch(Told):
        def start(self, total: int, done: int) -> None:
            os.utime(source / "model.safetensors", (1, 1))

    with pytest.raises(RunFailure, match="was changed while it was converted"):
        convert(source, tmp_path / "out", "hf", OPTIONS, Touch())
    assert not (tmp_path / "out").exists()
