"""The view of Megatron's distributed checkpoints (`torch_dist`): whole tensors, layers and experts stacked.

Rules: `sharded_state_dict` of megatron-core's TransformerBlock (a leading axis of layers, or keys with the layer's
number), SequentialMLP and TEGroupedMLP (an axis of experts after it), MLP (all gate rows, then all up rows), and
GPTModel (a tied head is stored as the embedding alone). Nothing is cut by rank, so any parallel sizes can load it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import product
from math import prod

from grpo_mlm.errors import NamesDiffer
from grpo_mlm.layouts.boxes import Box, Layout
from grpo_mlm.layouts.megatron import Coordinates, MegatronParallel, megatron_layout
from grpo_mlm.layouts.model import ModelSpec
from grpo_mlm.layouts.weights import Shape, Stack, as_layout, pile

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_VOCABULARY = (EMBEDDING, HEAD)

# Norms that Transformer Engine fuses into the linear layer that follows. megatron-core's local layer spec writes them
# under the fused name too. Before experts, its Transformer Engine spec keeps the name on the left while its local spec
# writes the one on the right: each then fails to load what the other wrote.
_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_IGNORED = re.compile(r".*\._extra_state\b.*|(optimizer|chained_\d|rng_state|rerun_state_machine_state)\b.*")


@dataclass(frozen=True)
class DistLayout(Layout):
    """A layout whose tensors have more axes in the checkpoint than in `shapes`, where the leading ones are merged."""

    stored: dict[str, Shape] = field(default_factory=dict)
    """Their own shapes: [layers, experts, 2 ffn, hidden] is (layers * experts * 2 ffn, hidden) in `shapes`."""


@dataclass(frozen=True)
class _Tensor:
    """A stored tensor, or one slot of it: part `index` along the merged leading `axes`."""

    spellings: tuple[str, ...]  # keys that it may be stored under, the usual one first
    axes: Shape
    index: int
    shape: Shape  # of the slot
    boxes: list[tuple[str, Box]]  # canonical ones, in the order of its rows


def dist_layout(spec: ModelSpec, per_layer: bool = False, vocab_rows: int | None = None) -> DistLayout:
    """The checkpoint that this project writes.

    Norms before experts are under both of their names, so that models of either layer spec load it. `per_layer`: keys
    with the layer's number, as megatron-core always has them where some layers are dense and others are not.
    `vocab_rows`: rows of embedding and head, padding included; by default what megatron-core has without tensor
    parallelism.
    """
    per_layer = per_layer or (spec.moe is not None and spec.moe.dense_layers > 0)
    slots: dict[str, list[_Tensor]] = {}
    for tensor in _tensors(spec, per_layer):
        before_experts = spec.moe and tensor.spellings[-1].endswith("pre_mlp_layernorm.weight")
        for key in tensor.spellings if before_experts else tensor.spellings[:1]:
            slots.setdefault(key, []).append(tensor)
    return _as_dist_layout(slots, {} if vocab_rows is None else dict.fromkeys(_VOCABULARY, vocab_rows))


def stored_layout(
    spec: ModelSpec, stored: Mapping[str, Shape], allow_missing: Collection[str] = ()
) -> tuple[DistLayout, dict[str, str]]:
    """The layout of an existing checkpoint from the keys and shapes of its tensors, and the names let pass, with their
    keys: missing canonical tensors, and unknown keys by themselves.

    Either spelling of a norm is taken, layers stacked or by number, and any number of padding rows. What
    `is_model_key` rules out is left aside. NamesDiffer: keys that are missing, unknown ones, and shapes that
    config.json does not mean. `allow_missing`, glob patterns, lets missing and unknown keys pass; a missing one also
    by the names of the canonical tensors in it.
    """
    keys = {key for key in stored if is_model_key(key)}
    per_layer = any(re.match(r"decoder\.layers\.\d+\.", key) for key in keys)
    slots: dict[str, list[_Tensor]] = {}
    missing: dict[str, set[str]] = {}  # by key, the canonical tensors in it
    known: set[str] = set()
    for tensor in _tensors(spec, per_layer):
        known.update(tensor.spellings)
        found = [key for key in tensor.spellings if key in keys]
        for key in found:
            slots.setdefault(key, []).append(tensor)
        if not found:
            names = {name for name, _ in tensor.boxes}
            missing.setdefault(tensor.spellings[0], set()).update(names)
    unknown: dict[str, set[str]] = {key: set() for key in sorted(keys - known)}
    skipped = {key for key, names in (missing | unknown).items() if _allowed(key, names, allow_missing)}
    layout = _as_dist_layout(
        slots, {key: stored[key][0] for key in _VOCABULARY if key in slots and stored[key]}
    )
    problems = {
        "missing": [key for key in missing if key not in skipped],
        "not in this model": [key for key in unknown if key not in skipped],
        "of another shape": [
            f"{key} {stored[key]} instead of {shape}"
            for key, shape in layout.stored.items()
            if stored[key] != shape or (key in _VOCABULARY and shape[0] < spec.vocab_size)
        ],
    }
    if any(problems.values()):
        said = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise NamesDiffer(f"the checkpoint does not match config.json ({spec.family}); {said}")
    return layout, {name: key for key in sorted(skipped) for name in sorted(missing.get(key, {key}))}


def is_model_key(key: str) -> bool:
    """Whether a key belongs to the weights: not to the optimizer, a random generator, or a module's `_extra_state`."""
    return not _IGNORED.fullmatch(key)


def extra_state_keys(stored: Mapping[str, Shape]) -> Iterator[str]:
    """Keys of the `_extra_state` of every module of either layer spec, given its checkpoint's tensors.

    megatron-core saves one with each layer and expert of a module (nothing, but where it trains in fp8), and refuses a
    checkpoint that lacks one.
    """
    modules: dict[str, Shape] = {}
    for key, shape in stored.items():
        module = key.rpartition(".")[0]
        if key in _VOCABULARY or module.endswith("router"):
            continue
        axes = bool(re.match(r"decoder\.layers\.\D", key)) + (".experts.experts." in key)
        modules[module] = shape[:axes]
        if module.endswith("linear_qkv"):
            modules[module.replace("linear_qkv", "core_attention")] = shape[:axes]
    for module, axes_shape in modules.items():
        whole = axes_shape or (1,)
        for index in product(*map(range, whole)):
            yield f"{module}._extra_state/shard_{_dotted(index)}_{_dotted(whole)}"


def _dotted(numbers: Iterable[int]) -> str:
    return ".".join(map(str, numbers))


def _tensors(spec: ModelSpec, per_layer: bool) -> Iterator[_Tensor]:
    """Every tensor of the model on one rank, with its place among the checkpoint's."""
    whole = megatron_layout(spec, MegatronParallel(), Coordinates())
    boxes: dict[str, list[tuple[str, Box]]] = {name: [] for name in whole.shapes}
    for piece in whole.pieces:
        boxes[piece.local].append((piece.tensor, piece.box))
    for name, shape in whole.shapes.items():
        prefix, index, rest = "", 0, name
        axes: Shape = ()
        if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
            layer, rest = int(match[1]), match[2]
            prefix = f"decoder.layers.{layer}." if per_layer else "decoder.layers."
            axes, index = ((), 0) if per_layer else ((spec.layers,), layer)
        if spec.moe and (match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest)):
            rest = f"mlp.experts.experts.{match[2]}"
            axes, index = (*axes, spec.moe.experts), index * spec.moe.experts + int(match[1])
        spellings = tuple(prefix + x for x in ((_NORMS[rest], rest) if rest in _NORMS else (rest,)))
        yield _Tensor(spellings, axes, index, shape, boxes[name])


def _as_dist_layout(slots: Mapping[str, list[_Tensor]], vocab_rows: Mapping[str, int]) -> DistLayout:
    stacks: dict[str, Stack] = {}
    stored: dict[str, Shape] = {}
    for key, tensors in slots.items():
        first = tensors[0]
        if key in _VOCABULARY:
            rows, width = first.shape
            stored[key] = (vocab_rows.get(key, rows), width)
            stacks[key] = Stack(first.boxes, (0, stored[key][0]))
        else:
            stacks[key] = pile([Stack(t.boxes) for t in sorted(tensors, key=lambda t: t.index)])
            stored[key] = (*first.axes, *first.shape)
    layout = as_layout(stacks)
    assert all(prod(shape) == prod(layout.shapes[key]) for key, shape in stored.items())
    return DistLayout(layout.shapes, layout.pieces, layout.fills, stored)


def _allowed(key: str, canonical: set[str], patterns: Collection[str]) -> bool:
    return any(
        fnmatchcase(key, pattern) or (canonical and all(fnmatchcase(name, pattern) for name in canonical))
        for pattern in patterns
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
