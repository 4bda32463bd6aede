"""What goes with the weights: config, tokenizer and templates, copied byte for byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from grpo_mlm.bridge.durable import copy_files, side_files, sync
from grpo_mlm.convert.options import Dtype
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import read_config_json

HF_MANIFEST = "conversion_manifest.json"
_KEYS = ("dtype", "torch_dtype")  # of transformers 5 and 4


def refuse_remote_code(folder: Path, allowed: bool) -> None:
    """UserError where the model's folder brings code along that loaders would run."""
    config = read_config_json(folder)
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if allowed or not (config.get("auto_map") or scripts):
        return
    what = "auto_map in config.json" if config.get("auto_map") else ", ".join(scripts)
    raise UserError(
        f"{folder} holds remote code ({what}), which would go into the output; "
        "read it, then pass --allow-remote-code"
    )


def copy_sidecar(source: Path, out: Path, dtype: Dtype) -> list[str]:
    """Copy what is not weights to the folder `out`. Returns lines that say what was changed, none with dtype "keep"."""
    out.mkdir(exist_ok=True)
    copy_files(side_files(source), out, skip=lambda name: name == HF_MANIFEST)
    if dtype == "keep":
        return []
    config = out / "config.json"
    text = config.read_text(encoding="utf-8")
    changed, changes = _with_dtype(text, dtype)
    if changes:
        config.write_text(changed, encoding="utf-8")
        sync(config)
    return changes


def _with_dtype(text: str, dtype: str) -> tuple[str, list[str]]:
    """The text of a config.json that states its weights' dtype, all else as it is; and what was changed."""
    config: dict[str, Any] = json.loads(text)
    changes: list[str] = []
    for key in _KEYS:
        old = config.get(key)
        if not isinstance(old, str) or old == dtype:
            continue
        config[key] = dtype
        pattern = rf'("{key}"\s*:\s*)"{re.escape(old)}"'
        text = re.sub(pattern, rf'\g<1>"{dtype}"', text, count=1)
        if json.loads(text) != config:  # the first such key is not at the top level
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        changes.append(f"config.json: {key} {old} -> {dtype}")
    return text, changes
