"""From a model folder to its spec, and from the spec to its weights and canonical tensors."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from pathlib import Path

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import read_config_json
from grpo_mlm.layouts.families import FAMILIES
from grpo_mlm.layouts.spec import ModelSpec, Rope
from grpo_mlm.layouts.weights import Shape, Weight

__all__ = [
    "ModelSpec",
    "Rope",
    "canonical_tensors",
    "float32_tensors",
    "model_weights",
    "read_model_spec",
    "weights_by_place",
]


def read_model_spec(folder: Path | str) -> ModelSpec:
    """The spec of the model in a Hugging Face folder, from its config.json alone.

    UserError: no config.json, an adapter, an unknown family, or something in it that is not supported.
    """
    config = read_config_json(Path(folder))
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{folder}/config.json: model_type {family!r} is not supported; known: {known}")
    try:
        return FAMILIES[family].read(config)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


@lru_cache(maxsize=4)  # a mixture of experts has tens of thousands, and every rank's layout is made of them
def model_weights(spec: ModelSpec) -> tuple[Weight, ...]:
    """Every weight of the model, in the order of computation."""
    return tuple(FAMILIES[spec.family].weights(spec))


@lru_cache(maxsize=4)
def weights_by_place(spec: ModelSpec) -> dict[int | str, list[Weight]]:
    """The same weights by the layer that owns them, "embedding" or "head"."""
    by_place: dict[int | str, list[Weight]] = defaultdict(list)
    for weight in model_weights(spec):
        by_place[weight.place].append(weight)
    return by_place


def canonical_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes of the Hugging Face tensors; no lm_head where it is tied to the embedding."""
    shapes: dict[str, Shape] = {}
    for weight in model_weights(spec):
        for name, box in weight.canonical:
            known = shapes.get(name, (0,) * len(box))
            shapes[name] = tuple(max(n, stop) for n, (_, stop) in zip(known, box, strict=True))
    return shapes


def float32_tensors(spec: ModelSpec) -> frozenset[str]:
    """Names of the canonical tensors that stay float32 whatever dtype the model is trained, served or stored in."""
    return frozenset(name for weight in model_weights(spec) if weight.fp32 for name, _ in weight.canonical)
