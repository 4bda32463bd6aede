"""The view of Hugging Face files: every canonical tensor whole, under its own name."""

from __future__ import annotations

from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.model import ModelSpec, canonical_tensors
from grpo_mlm.layouts.weights import Part, as_layout, full, stack

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def hf_layout(spec: ModelSpec, with_tied_head: bool = False) -> Layout:
    """The layout of a set of files. `with_tied_head`: they also hold the tied head as a tensor of its own."""
    canonical = canonical_tensors(spec)
    parts: dict[str, Part] = {name: stack(name, [(name, full(shape))]) for name, shape in canonical.items()}
    if with_tied_head and spec.tied:
        parts[HEAD] = stack(HEAD, [(EMBEDDING, full(canonical[EMBEDDING]))])
    return as_layout(parts)
