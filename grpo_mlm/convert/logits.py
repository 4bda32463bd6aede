"""Loads two sets of weights into transformers' models, one after the other, and compares logits of a fixed prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_mlm.convert.open import Weights
from grpo_mlm.errors import RunFailure, ValuesDiffer
from grpo_mlm.layouts.boxes import slices
from grpo_mlm.layouts.hf import hf_layout
from grpo_mlm.layouts.planner import make_plan

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class LogitsGap:
    """How far apart the logits are, and how large they are."""

    max_abs_difference: float
    largest_logit: float
    tolerance: float

    def as_json(self) -> dict[str, Any]:
        return {
            "max_abs_difference": self.max_abs_difference,
            "largest_logit": self.largest_logit,
            "tolerance": self.tolerance,
        }

    def line(self) -> str:
        return (
            f"logits of {PROMPT_TOKENS} tokens: largest difference {self.max_abs_difference:.3g}, "
            f"tolerance {self.tolerance:g} (largest logit {self.largest_logit:.3g})"
        )


def compare_logits(a: Weights, b: Weights, tolerance: float) -> LogitsGap:
    """Both models in float32 on the CPU. One is in memory at a time, in full.

    RunFailure where a model and the layout of its files name different tensors.
    """
    first, second = logits(a), logits(b)
    if first.shape != second.shape:
        raise ValuesDiffer(f"logits have shape {list(first.shape)} in A and {list(second.shape)} in B")
    gap = (first - second).abs().max()
    return LogitsGap(float(gap), float(first.abs().max()), tolerance)


def raise_unless_close(gap: LogitsGap) -> None:
    """ValuesDiffer where the logits are further apart than the tolerance, or not all numbers."""
    if not gap.max_abs_difference <= gap.tolerance:
        raise ValuesDiffer(gap.line())


@torch.no_grad()
def logits(weights: Weights) -> Tensor:
    """`[tokens, vocabulary]` in float32, of ids that are spread over the vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM  # heavy, and seldom asked for

    config = AutoConfig.from_pretrained(weights.sidecar, trust_remote_code=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    _fill(model.state_dict(), weights)
    model.eval()
    rows = weights.spec.vocab_size
    ids = torch.arange(1, PROMPT_TOKENS + 1) * 7919 % rows
    out: Tensor = model(ids[None]).logits[0]
    return out


def _fill(state: dict[str, Tensor], weights: Weights) -> None:
    """Copy the weights, slice by slice, into a model's tensors, which may fuse experts and tie the head."""
    # Transformers calls Mixtral's block `mlp`, its files call it `block_sparse_moe`.
    spelt = {name.replace(".block_sparse_moe.", ".mlp."): name for name in hf_layout(weights.spec).shapes}
    tensors = {spelt.get(name, name): tensor for name, tensor in state.items()}
    target = hf_layout(weights.spec, tensors.keys())
    odd = sorted(target.shapes.keys() ^ tensors.keys())
    if odd:
        raise RunFailure(f"transformers' model and its files name different tensors: {', '.join(odd[:8])}")
    matrices = {name: tensors[name].view(shape) for name, shape in target.shapes.items()}
    for copy in make_plan([weights.store.layout], [target]).copies:
        matrices[copy.dst_local][slices(copy.dst_box)] = weights.store.read(copy.src_local, copy.src_box)
