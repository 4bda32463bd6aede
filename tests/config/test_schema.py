"""The schema is the manual, imports nothing heavy, and every shipped file obeys it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_mlm.config import load_config, resolve_world
from grpo_mlm.config.explain import schema_keys

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "yaml_configs").glob("*.yaml"))


def test_every_key_is_documented() -> None:
    keys = dict(schema_keys())
    assert "actor.optim.lr" in keys
    assert "reward.functions.*.weight" in keys
    undocumented = [key for key, text in keys.items() if len(text) < 8 or not text.endswith((".", "`"))]
    assert undocumented == []


def test_every_key_is_read_by_the_program() -> None:
    """CFG-08: a documented option that nothing reads. By name: an attribute `.key` outside the config folder."""
    package = ROOT / "grpo_mlm"
    checking = {package / "config" / name for name in ("schema.py", "check.py", "load.py", "explain.py")}
    sources = [path.read_text() for path in package.rglob("*.py") if path not in checking]
    read = set(re.findall(r"\.([a-z]\w*)\b", "\n".join(sources)))
    assert [key for key, _ in schema_keys() if key.rpartition(".")[2] not in read] == []


def test_importing_config_loads_nothing_heavy() -> None:
    code = (
        "import sys, grpo_mlm.config\n"
        "heavy = {'torch', 'ray', 'vllm', 'transformers', 'numpy', 'megatron', 'pyarrow', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_there_are_shipped_configs() -> None:
    names = {path.name for path in SHIPPED}
    assert {"quickstart.yaml", "tiny_base.yaml", "tiny_tp2pp2.yaml", "tiny_dp2.yaml"} <= names


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_load(path: Path) -> None:
    """CFG-01: all shipped YAMLs load under strict mode."""
    assert not load_config(path).model.path.startswith("~")


def test_tiny_configs_ask_for_the_layouts_in_their_names() -> None:
    worlds = {
        name: resolve_world(load_config(ROOT / "yaml_configs" / f"{name}.yaml"), None)
        for name in ("tiny_tp2pp2", "tiny_dp2")
    }
    first, second = worlds["tiny_tp2pp2"], worlds["tiny_dp2"]
    assert (first.tp, first.pp, first.dp, first.rollout_tp, first.num_engines) == (2, 2, 1, 2, 1)
    assert (second.tp, second.pp, second.dp, second.rollout_tp, second.num_engines) == (1, 1, 2, 1, 2)
