"""Reads fields of a model's config.json: a wrong or unsupported one is an error that names it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.spec import Rope

_REQUIRED = object()
_SCALING_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config_json(folder: Path) -> dict[str, Any]:
    """The config.json of a Hugging Face folder. UserError: no such file, not JSON, or an adapter (CNV-10)."""
    path = folder / "config.json"
    if (folder / "adapter_config.json").exists():
        raise UserError(
            f"{folder} holds an adapter (adapter_config.json); its weights would be left out. "
            "Merge it into the base model and name the merged folder."
        )
    if not path.is_file():
        raise UserError(f"{folder} is not a model folder: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} must be a JSON object, not {type(config).__name__}")
    return config


def whole(config: dict[str, Any], key: str, default: Any = _REQUIRED, least: int = 1) -> int:
    """A whole number, positive unless `least` says otherwise; absent or null is the default, or an error."""
    value = config.get(key)
    if value is None and default is not _REQUIRED:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise UserError(f"config.json: {key} is {value!r}, expected {expected}")
    return value


def real(config: dict[str, Any], key: str, default: Any = _REQUIRED) -> float:
    """A positive number; absent or null is the default, or an error where there is none."""
    value = config.get(key)
    if value is None and default is not _REQUIRED:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {key} is {str(value)[:40]}, expected a positive number")
    return float(value)


def switch(config: dict[str, Any], key: str) -> bool:
    """True or false; absent or null is false."""
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"config.json: {key} is {value!r}, expected true or false")
    return bool(value)


def refuse(config: dict[str, Any], key: str, supported: tuple[Any, ...]) -> None:
    """UserError when the key is there with a value that no engine here computes."""
    value = config.get(key)
    if value is not None and value not in supported:
        raise UserError(f"config.json: {key} = {value!r} is not supported, only {supported[0]!r}")


def refuse_unsupported(config: dict[str, Any]) -> None:
    """UserError for what no family here computes: other activations, windows, quantised weights."""
    refuse(config, "hidden_act", ("silu",))
    refuse(config, "use_sliding_window", (False,))
    refuse(config, "partial_rotary_factor", (1.0,))
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise UserError(f"config.json: layer_types is {kinds!r}, expected a list of names")
    other = sorted(set(kinds) - {"full_attention"})
    if other:
        raise UserError(f"config.json: layer_types has {other}, only 'full_attention' is supported")
    if config.get("quantization_config"):
        raise UserError(
            "config.json: quantization_config: quantised weights cannot be trained; dequantise first"
        )


def read_rope(config: dict[str, Any], default_theta: float) -> Rope:
    """The rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (CNV-06)."""
    new, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(value, dict) or any(isinstance(v, dict) for v in value.values()):
            raise UserError(f"config.json: {key} is {value!r}, expected one flat object for all layers")
    numbers = {**old, **new}
    theta = real(
        {"rope_theta": numbers.get("rope_theta", config.get("rope_theta"))}, "rope_theta", default_theta
    )
    refuse(numbers, "partial_rotary_factor", (1.0,))
    kind = numbers.get("rope_type") or numbers.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind not in _SCALING_NUMBERS:
        known = ", ".join(["default", *_SCALING_NUMBERS])
        raise UserError(f"config.json: rope type {kind!r} is not supported; known: {known}")
    if kind == "llama3":  # as transformers: the length of pre-training is the model's own unless stated
        numbers.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    scaling = {key: real(numbers, key) for key in _SCALING_NUMBERS[kind]}
    return Rope(theta, {"rope_type": kind, **scaling})
