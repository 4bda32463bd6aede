"""The example of the page on layouts does what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "layouts.md"


def test_the_example_prints_what_the_page_shows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code, output = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL).groups()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == output


def test_every_file_that_the_page_names_is_there() -> None:
    root = PAGE.parents[1]
    for name in re.findall(
        r"`((?:layouts|rollout|grpo_mlm)/[\w/]+(?:\.py)?)/?`", PAGE.read_text(encoding="utf-8")
    ):
        assert (root / name).exists() or (root / "grpo_mlm" / name).exists(), name
