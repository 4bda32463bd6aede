"""The vLLM view: one engine rank's weights in checkpoint layout (before kernels re-lay them out).

They are the model's parameters, and buffers that a checkpoint fills (the `e_score_correction_bias` of a router).

Rules: vLLM's QKVParallelLinear (blocks q, k, v; key-value heads replicated where tp exceeds them),
MergedColumnParallelLinear (gate, up), RowParallelLinear, VocabParallelEmbedding (padded to a multiple of 64), and
its fused experts (w13 and w2, seen as matrices). A live engine's own loaders are the authority: `rollout/recorder.py`.
"""

from __future__ import annotations

from collections import defaultdict

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.collector import without_collector
from grpo_mlm.layouts.model import ModelSpec, model_weights
from grpo_mlm.layouts.weights import (
    Cut,
    Kind,
    Stack,
    Weight,
    as_layout,
    columns,
    gate_up,
    pile,
    replicated,
    rows,
    share,
    vocab,
)

VOCAB_MULTIPLE = 64


@without_collector()
def vllm_layout(spec: ModelSpec, tp: int, tp_rank: int, ep: bool = False) -> Layout:
    """What rank `tp_rank` of an engine holds; a tied head is the embedding, so it has no entry of its own.

    `ep`: whole experts are dealt out over the ranks, instead of a slice of each expert on every rank. The experts of a
    rank lie in one tensor. UserError where heads, key-value heads, MLP width or padded vocabulary do not divide as
    vLLM needs.
    """
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise UserError(
            f"{spec.family}: {spec.kv_heads} key-value heads and rollout tensor parallel size {tp}: "
            "one must be a multiple of the other"
        )
    stacks: dict[str, list[Stack]] = defaultdict(list)
    for weight in model_weights(spec):
        if spec.tied and weight.kind == "vocab" and weight.place == "head":
            continue
        cut = (tp, tp_rank)
        if ep and weight.expert is not None:
            if weight.expert not in _experts_of(spec, tp, tp_rank):
                continue
            cut = (1, 0)
        stacks[weight.vllm].append(_CUTS[weight.kind](spec, weight, *cut))
    return as_layout({name: pile(held) for name, held in stacks.items()})


def _experts_of(spec: ModelSpec, ranks: int, rank: int) -> range:
    """Consecutive experts; where they do not divide, the first ranks have one more."""
    assert spec.moe is not None
    each, more = divmod(spec.moe.experts, ranks)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _qkv(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    """[q heads of the rank; its k heads; its v heads]; each kv head lives on tp/kv_heads ranks if tp is greater."""
    heads = share(spec.heads, tp, f"{spec.family}: number of attention heads")
    kv_heads = max(spec.kv_heads // tp, 1)
    kv_rank = rank if spec.kv_heads >= tp else rank // (tp // spec.kv_heads)
    q, k, v = weight.canonical
    mine = ((q, heads, rank), (k, kv_heads, kv_rank), (v, kv_heads, kv_rank))
    return Stack(
        [
            (tensor, rows(box, n * spec.head_dim * r, n * spec.head_dim * (r + 1)))
            for (tensor, box), n, r in mine
        ]
    )


_CUTS: dict[Kind, Cut] = {
    "replicated": replicated,
    "vocab": vocab(VOCAB_MULTIPLE),
    "columns": columns,
    "gate_up": gate_up,
    "qkv": _qkv,
}
