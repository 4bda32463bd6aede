"""The Megatron view: what one trainer rank's GPTModel holds.

Local names are those of `GPTModel.named_parameters()`. Rules: megatron-core's SelfAttention (fused q, k, v
interleaved by query group), MLP (gate and up cut each by itself), VocabParallelEmbedding (padded vocabulary),
and an even cut of the layers into pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box, Layout
from grpo_mlm.layouts.model import ModelSpec, model_weights
from grpo_mlm.layouts.weights import (
    Cut,
    Kind,
    Part,
    Weight,
    as_layout,
    columns,
    gate_up,
    padded,
    replicated,
    rows,
    share,
    stack,
    vocab,
)

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this times tp."""

# Transformer Engine fuses these norms into the linear layer that follows.
_TE_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class MegatronParallel:
    """Sizes of the model-parallel groups: tensor and pipeline."""

    tp: int = 1
    pp: int = 1


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """Vocabulary rows of all tensor-parallel ranks together, padding included."""
    return padded(spec.vocab_size, VOCAB_MULTIPLE * tp)


def stage_layers(spec: ModelSpec, par: MegatronParallel, pp_rank: int) -> range:
    """The layers of the whole model that this pipeline stage owns; UserError where they do not divide."""
    each = share(spec.layers, par.pp, "number of layers")
    return range(pp_rank * each, (pp_rank + 1) * each)


def megatron_layout(
    spec: ModelSpec, par: MegatronParallel, tp_rank: int, pp_rank: int, te: bool = False
) -> Layout:
    """What rank (tp_rank, pp_rank) holds. `te`: names of the Transformer Engine layer spec.

    UserError where heads, query groups, MLP width or layers do not divide as megatron-core needs.
    """
    _check_heads(spec, par.tp)
    layers = stage_layers(spec, par, pp_rank)
    parts: dict[str, Part] = {}
    for weight in model_weights(spec):
        if _owned(spec, weight, par, pp_rank, layers):
            name = _local_name(weight, layers, te)
            parts[name] = _CUTS[weight.kind](spec, weight, name, par.tp, tp_rank)
    return as_layout(parts)


def megatron_layouts(spec: ModelSpec, par: MegatronParallel, dp: int, te: bool = False) -> list[Layout]:
    """Layouts of all trainer ranks in megatron-core's order: tensor fastest, then data, then pipeline."""
    world = []
    for pp_rank in range(par.pp):
        replica = [megatron_layout(spec, par, tp_rank, pp_rank, te) for tp_rank in range(par.tp)]
        world += replica * dp
    return world


def _check_heads(spec: ModelSpec, tp: int) -> None:
    share(spec.heads, tp, f"{spec.family}: number of attention heads")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise UserError(
            f"{spec.family}: {spec.kv_heads} key-value heads and tensor parallel size {tp}: "
            "one must be a multiple of the other"
        )


def _owned(spec: ModelSpec, weight: Weight, par: MegatronParallel, pp_rank: int, layers: range) -> bool:
    if isinstance(weight.place, int):
        return weight.place in layers
    if weight.place == "embedding":
        return pp_rank == 0
    # A tied head is the embedding itself where one stage has both; else the last stage keeps its own copy.
    tied_head = spec.tied and weight.kind == "vocab"
    return pp_rank == par.pp - 1 and not (tied_head and par.pp == 1)


def _local_name(weight: Weight, layers: range, te: bool) -> str:
    if not isinstance(weight.place, int):
        return weight.megatron
    name = weight.megatron
    for local, fused in _TE_NAMES.items() if te else ():
        name = name.replace("{layer}." + local, "{layer}." + fused)
    return name.replace("{layer}", str(weight.place - layers.start))


def _qkv(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    """Rows interleaved by query group, [q heads of the group; its k head; its v head], then cut into tp equal
    intervals. With fewer groups than ranks a cut goes through a group, and some ranks hold no k or v at all."""
    total = sum(shape[0] for _, shape in weight.canonical)
    each = share(total, tp, f"{weight.megatron}: number of rows")
    return stack(local, _query_groups(spec, weight), (rank * each, (rank + 1) * each))


def _query_groups(spec: ModelSpec, weight: Weight) -> Iterator[tuple[str, Box]]:
    for group in range(spec.kv_heads):
        for tensor, shape in weight.canonical:
            each = shape[0] // spec.kv_heads
            yield tensor, rows(shape, group * each, (group + 1) * each)


def _vocab(spec: ModelSpec, weight: Weight, local: str, tp: int, rank: int) -> Part:
    return vocab(VOCAB_MULTIPLE * tp)(spec, weight, local, tp, rank)


_CUTS: dict[Kind, Cut] = {
    "replicated": replicated,
    "vocab": _vocab,
    "columns": columns,
    "gate_up": gate_up,
    "qkv": _qkv,
}
