"""What `plan` plans for: files, or the ranks of a trainer or an engine, in a small language.

hf                                  Hugging Face files, as `export` writes them
dist                                a Megatron distributed checkpoint, as `import` writes it
megatron[:tp=2,pp=2,...]            the ranks of a Megatron trainer
vllm[:tp=4,...]                     the ranks of vLLM engines
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import Literal

from grpo_mlm.config.suggest import did_you_mean
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.megatron import LOCAL, TE, MegatronParallel, megatron_layouts
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.vllm import vllm_layout

Kind = Literal["hf", "dist", "megatron", "vllm"]
FILES: tuple[Kind, ...] = ("hf", "dist")
"""Kinds that are one set of files; the others are ranks."""

# key -> what it is. A number is at least 1; a switch is true or false.
_KEYS: dict[Kind, dict[str, type]] = {
    "hf": {},
    "dist": {},
    "megatron": {
        "tp": int, "pp": int, "vpp": int, "ep": int, "etp": int, "dp": int, "first": int, "last": int, "te": bool,
    },
    "vllm": {"tp": int, "replicas": int, "ep": bool},
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A parsed target; `text` is what the user wrote, `sizes` has the keys that are given."""

    text: str
    kind: Kind
    sizes: Mapping[str, int]  # switches are 0 or 1


def parse_target(text: str) -> Target:
    """UserError, with what would be right: unknown kind or key, a key twice, a value that is no size."""
    name, colon, rest = text.partition(":")
    kind = next((known for known in _KEYS if known == name), None)
    if kind is None:
        raise UserError(
            f"target {text!r}: {name!r} is not known; choose hf, dist, megatron:tp=2,pp=2 or vllm:tp=4"
            + did_you_mean(name, _KEYS)
        )
    keys = _KEYS[kind]
    sizes: dict[str, int] = {}
    for entry in rest.split(",") if colon else ():
        key, equals, value = entry.partition("=")
        if key not in keys:
            known = f"its keys are {', '.join(keys)}" if keys else "it takes no sizes"
            raise UserError(f"target {text!r}: {kind} has no {key!r}; {known}{did_you_mean(key, keys)}")
        if key in sizes:
            raise UserError(f"target {text!r}: {key} is given twice")
        sizes[key] = _value(text, key, value if equals else "", keys[key])
    return Target(text, kind, sizes)


def rank_layouts(target: Target, spec: ModelSpec) -> list[Layout]:
    """What each rank of a trainer or of the engines holds; replicas share one object.

    UserError where the model cannot be cut that way.
    """
    try:
        return _megatron(target, spec) if target.kind == "megatron" else _vllm(target, spec)
    except UserError as error:
        raise UserError(f"target {target.text!r}: {error}") from error


def _megatron(target: Target, spec: ModelSpec) -> list[Layout]:
    given = target.sizes
    par = MegatronParallel(
        tp=given.get("tp", 1),
        pp=given.get("pp", 1),
        vpp=given.get("vpp", 1),
        ep=given.get("ep", 1),
        etp=given.get("etp"),
        first_stage_layers=given.get("first"),
        last_stage_layers=given.get("last"),
    )
    if spec.moe is None and (par.ep > 1 or par.etp is not None):
        raise UserError(f"{spec.family} has no experts; leave out ep and etp")
    block = par.expert_tp * par.ep if spec.moe else 1
    least = block // gcd(block, par.tp)  # data parallel size with which the experts' ranks fit
    return megatron_layouts(spec, par, given.get("dp", least), TE if given.get("te") else LOCAL)


def _vllm(target: Target, spec: ModelSpec) -> list[Layout]:
    tp, ep = target.sizes.get("tp", 1), bool(target.sizes.get("ep"))
    if ep and spec.moe is None:
        raise UserError(f"{spec.family} has no experts; leave out ep")
    engine = [vllm_layout(spec, tp, rank, ep) for rank in range(tp)]
    return engine * target.sizes.get("replicas", 1)


def _value(text: str, key: str, value: str, kind: type) -> int:
    if kind is bool:
        if value not in ("true", "false"):
            raise UserError(f"target {text!r}: {key} is true or false, as in {key}=true, not {value!r}")
        return int(value == "true")
    if not value.isascii() or not value.isdigit() or int(value) < 1:
        raise UserError(f"target {text!r}: {key} is a whole number from 1, as in {key}=2, not {value!r}")
    return int(value)
