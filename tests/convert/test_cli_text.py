"""Sizes as the command line takes and shows them, and help that is enough to convert without other documents."""

import pytest

from grpo_mlm.convert.plan_table import spans
from grpo_mlm.convert.text import parse_size, printable, show_seconds, show_size
from grpo_mlm.errors import UserError
from tests.convert.command import convert


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("512MiB", 536_870_912),
        ("1.5KB", 1500),
        ("0.5KiB", 512),
        (" 2TB ", 2 * 10**12),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--limit") == size


@pytest.mark.parametrize(
    "text", ["", "5", "GB", "5G", "0GB", "-1GB", "5GBit", "1e9B", "5,5GB", "٥GB", "0.1B", "9" * 400 + "GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="--limit") as error:
        parse_size(text, "--limit")
    assert repr(text) in str(error.value)
    assert "512MiB" in str(error.value)


def test_shown() -> None:
    assert [show_size(n) for n in (0, 999, 1000, 16_382_076_928, 65_520_000_000_000)] == [
        "0 B", "999 B", "1 KB", "16.4 GB", "65.5 TB",
    ]  # fmt: skip
    assert [show_seconds(s) for s in (0.2, 90, 600, 9000)] == ["under 1 s", "90 s", "10 min", "2.5 h"]
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert spans(range(0, 20, 2)) == "0,2,4,6,... (10)"
    assert printable("a\x1b[2J\nb\x07") == "a\\x1b[2J\nb\\x07"


def test_help_is_enough() -> None:
    """Commands, formats, an example of each, exit codes; defaults with their units."""
    text = convert("--help").out
    for word in ("plan", "import", "export", "verify", "torch_dist", "latest_checkpointed_iteration.txt"):
        assert word in text
    for code in ("0  ", "2  ", "3  ", "4  ", "5  ", "130"):
        assert f"  {code}" in text
    assert "the same as" in text
    for command in ("plan", "import", "export", "verify"):
        done = convert(command, "--help")
        assert done.code == 0
        assert f"grpo-mlm convert {command} " in done.out
        assert "512MiB" in done.out
        assert "--reference" in done.out
    assert "5GB" in convert("export", "--help").out
    for key in ("tp, pp, ep, etp", "vpp", "first, last", "replicas", "1GB"):
        assert key in convert("plan", "--help").out


def test_no_arguments_show_help() -> None:
    assert "Usage" in convert().out + convert().err
