"""`python -m tools.checkpoint_convert` from a checkout, and signals and terminals, as a user has them."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.convert.command import QWEN3, convert, make_model

ROOT = Path(__file__).parents[2]
TOOL = [sys.executable, "-m", "tools.checkpoint_convert"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "[qwen3]")


def tool(*args: object) -> subprocess.CompletedProcess[str]:
    """The tool, run in a checkout, without a terminal."""
    return subprocess.run(
        [*TOOL, *map(str, args)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_the_tool_is_the_command(model: Path) -> None:
    done = tool("--help")
    assert done.returncode == 0
    assert "Usage: python -m tools.checkpoint_convert" in done.stdout
    same = convert("--help").out
    assert done.stdout.split("\n", 1)[1] == same.split("\n", 1)[1]
    done = tool("verify", model, "/nowhere/at/all")
    assert done.returncode == 2
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr


def test_plain_lines_without_a_terminal(model: Path, tmp_path: Path) -> None:
    done = tool("import", model, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stderr
    assert "(100%)" in done.stderr
    assert done.stdout == f"wrote {tmp_path / 'out'}: 78.6 KB in 1 file\n"


def test_a_bar_on_a_terminal(model: Path, tmp_path: Path) -> None:
    """Standard error is a terminal, standard output is not: a bar, no lines, and a plain result."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*TOOL, "export", str(model), str(tmp_path / "out")],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.stdout is not None
    out = process.stdout.read().decode()
    process.stdout.close()
    assert process.wait(TIMEOUT_S) == 0
    assert b"\x1b[" in shown
    assert "━".encode() in shown
    assert b"(100%)" not in shown
    assert "\x1b" not in out
    assert out.startswith(f"wrote {tmp_path / 'out'}")


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_what_the_same_command_goes_on_from(sent: signal.Signals, tmp_path: Path) -> None:
    """Files of one tensor each, so that there is time to stop between them."""
    source = make_model(tmp_path / "model", QWEN3 | {"num_hidden_layers": 400})
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    args = ["export", str(source), str(out), "--max-shard-size", "1KB", "--workers", "1"]
    process = subprocess.Popen([*TOOL, *args], cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + TIMEOUT_S
    while len(list(partial.glob("*.safetensors"))) < 3:
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):  # still running
            process.wait(0.02)
    process.send_signal(sent)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, said
    assert f"{partial}" in said
    assert "Traceback" not in said
    assert not out.exists()
    written = {path: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}
    assert len(written) >= 3
    done = tool(*args)
    assert done.returncode == 0, done.stderr
    assert "done by an earlier run" in done.stderr
    for path, when in written.items():
        assert (out / path.name).stat().st_mtime_ns == when
    assert convert("verify", source, out).code == 0
