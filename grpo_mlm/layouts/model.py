"""From a model folder to its spec, and from the spec to its weights and canonical tensors."""

from __future__ import annotations

from pathlib import Path

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import read_config_json
from grpo_mlm.layouts.families import FAMILIES
from grpo_mlm.layouts.spec import ModelSpec, Rope
from grpo_mlm.layouts.weights import Shape, Weight

__all__ = ["ModelSpec", "Rope", "canonical_tensors", "model_weights", "read_model_spec"]


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


def model_weights(spec: ModelSpec) -> list[Weight]:
    """Every weight of the model, in the order of computation."""
    return list(FAMILIES[spec.family].weights(spec))


def canonical_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Names and shapes of the Hugging Face tensors; no lm_head where it is tied to the embedding."""
    shapes: dict[str, Shape] = {}
    for weight in model_weights(spec):
        for name, box in weight.canonical:
            known = shapes.get(name, (0,) * len(box))
            shapes[name] = tuple(max(n, stop) for n, (_, stop) in zip(known, box, strict=True))
    return shapes
