"""The view of Hugging Face files: canonical tensors whole, under the names that a folder stores them by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.model import ModelSpec, canonical_tensors, model_weights
from grpo_mlm.layouts.weights import Stack, Weight, as_layout, full, pile

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_layout(spec: ModelSpec, stored: Collection[str] = ()) -> Layout:
    """The layout of a set of files; `stored` are the names in a folder whose spelling is kept.

    They may hold a tied head as a tensor of its own, and the experts of a layer fused into one tensor
    (`mlp.experts.gate_up_proj` [experts, 2 ffn, hidden] and `mlp.experts.down_proj` [experts, hidden, ffn]), as the
    modules of transformers 5 do.
    """
    shapes, names = canonical_tensors(spec), frozenset(stored)
    stacks: dict[str, list[Stack]] = defaultdict(list)
    for weight in model_weights(spec):
        fused = _fused_name(weight)
        if fused in names:
            stacks[fused].append(Stack(weight.canonical))
            continue
        for tensor, _ in weight.canonical:
            stacks[tensor] = [Stack([(tensor, full(shapes[tensor]))])]
    if spec.tied and HEAD in names:
        stacks[HEAD] = [Stack([(EMBEDDING, full(shapes[EMBEDDING]))])]
    return as_layout({name: pile(held) for name, held in stacks.items()})


def _fused_name(weight: Weight) -> str:
    """Of the tensor that holds all experts of the layer; "" for what does not belong to an expert."""
    if weight.expert is None:
        return ""
    which = "gate_up_proj" if weight.kind == "gate_up" else "down_proj"
    return f"model.layers.{weight.place}.mlp.experts.{which}"
