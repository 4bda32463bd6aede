"""docs/conversion.md: every command on the page, run in order, prints what the page says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.command import convert

PAGE = Path(__file__).parents[2] / "docs" / "conversion.md"
ECHO = "; echo $?"
PROGRESS = re.compile(r"(writing|comparing|checking|config\.json:) ")


def run(command: str) -> str:
    """What a command prints: its results, then its errors, without progress; and its exit code if that is asked for."""
    program, *args = shlex.split(command.removesuffix(ECHO))
    if program == "python":
        subprocess.run([sys.executable, *args], check=True, capture_output=True)
        return ""
    assert [program, args[0]] == ["grpo-mlm", "convert"]
    done = convert(*args[1:])
    if ECHO not in command:
        assert done.code == 0, done.err
    errors = [line for line in done.err.splitlines() if not PROGRESS.match(line)]
    code = [str(done.code)] if ECHO in command else []
    return "\n".join([*done.out.splitlines(), *errors, *code])


def matches(printed: str, said: str) -> bool:
    """Line for line, but for spaces at the ends of lines; `...` stands for any lines."""
    lines = [r"(?:.*\n)*" if line == "..." else re.escape(line.rstrip()) + "\n" for line in said.splitlines()]
    text = "".join(line.rstrip() + "\n" for line in printed.splitlines())
    return re.fullmatch("".join(lines), text) is not None


def test_every_command_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```console\n\$ (.+)\n((?:.*\n)*?)```", PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == 10
    for command, said in blocks:
        printed = run(command)
        assert matches(printed, said), f"$ {command}\n{printed}"
