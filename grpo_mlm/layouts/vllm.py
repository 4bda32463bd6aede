"""The vLLM view: one engine rank's parameters in checkpoint layout (before kernels re-lay them out).

Rules: vLLM's QKVParallelLinear (blocks q, k, v; key-value heads replicated where tp exceeds them),
MergedColumnParallelLinear (gate, up), RowParallelLinear, VocabParallelEmbedding (padded to a multiple of 64).
"""

from __future__ import annotations

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.model import ModelSpec, model_weights
from grpo_mlm.layouts.weights import (
    Cut,
    Kind,
    Part,
    Weight,
    as_layout,
    columns,
    gate_up,
    replicated,
    rows,
    share,
    stack,
    vocab,
)

VOCAB_MULTIPLE = 64


def vllm_layout(spec: ModelSpec, tp: int, tp_rank: int) -> Layout:
    """What rank `tp_rank` of an engine holds; a tied head is the embedding, so it has no entry of its own.

    UserError where heads, key-value heads, MLP width or padded vocabulary do not divide as vLLM needs.
    """
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise UserError(
            f"{spec.family}: {spec.kv_heads} key-value heads and rollout tensor parallel size {tp}: "
            "one must be a multiple of the other"
        )
    parts: dict[str, Part] = {}
    for weight in model_weights(spec):
        if not (spec.tied and weight.kind == "vocab" and weight.place == "head"):
            parts[weight.vllm] = _CUTS[weight.kind](spec, weight, weight.vllm, tp, tp_rank)
    return as_layout(parts)


def _qkv(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """[q heads of the rank; its k heads; its v heads]; each kv head lives on tp/kv_heads ranks if tp is greater."""
    heads = share(spec.heads, tp, f"{spec.family}: number of attention heads")
    kv_heads = max(spec.kv_heads // tp, 1)
    kv_rank = rank if spec.kv_heads >= tp else rank // (tp // spec.kv_heads)
    q, k, v = weight.canonical
    mine = ((q, heads, rank), (k, kv_heads, kv_rank), (v, kv_heads, kv_rank))
    return stack(
        local,
        [
            (tensor, rows(shape, n * spec.head_dim * r, n * spec.head_dim * (r + 1)))
            for (tensor, shape), n, r in mine
        ],
    )


_CUTS: dict[Kind, Cut] = {
    "replicated": replicated,
    "vocab": vocab(VOCAB_MULTIPLE),
    "columns": columns,
    "gate_up": gate_up,
    "qkv": _qkv,
}
