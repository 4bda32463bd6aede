"""The Megatron view: what one trainer rank's GPTModel holds.

Local names are those of `GPTModel.named_parameters()` and of its persistent buffers (the router's `expert_bias`).
Rules: megatron-core's SelfAttention (fused q, k, v interleaved by query group), MLP (gate and up cut each by itself;
SharedExpertMLP is one), SequentialMLP and TEGroupedMLP (consecutive experts on each rank), VocabParallelEmbedding
(padded vocabulary), get_transformer_layer_offset (stages and their chunks).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box, Layout
from grpo_mlm.layouts.collector import without_collector
from grpo_mlm.layouts.model import ModelSpec, weights_by_place
from grpo_mlm.layouts.weights import (
    Cut,
    Kind,
    Stack,
    Weight,
    as_layout,
    columns,
    gate_up,
    height,
    padded,
    replicated,
    rows,
    share,
    vocab,
)

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this times tp."""

# Transformer Engine fuses these norms into the linear layer that follows; a router follows the norm before experts.
_TE_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass(frozen=True)
class MegatronParallel:
    """Sizes of the model-parallel groups.

    `vpp` is the number of model chunks that each pipeline stage holds. `etp`, the tensor parallelism of the experts, is
    that of the rest if None. The first and last pipeline stage may own another number of layers than the others.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp


@dataclass(frozen=True)
class Coordinates:
    """A rank's place in the model-parallel groups."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class Naming:
    """How the model's modules are built. `te`: Transformer Engine's layer spec. `grouped`: all experts of a rank in
    one module (TEGroupedMLP) instead of a sequence of MLPs."""

    te: bool = False
    grouped: bool = False


LOCAL = Naming()
TE = Naming(te=True, grouped=True)
"""What this project builds on GPUs."""


def padded_vocab(spec: ModelSpec, tp: int) -> int:
    """Vocabulary rows of all tensor-parallel ranks together, padding included."""
    return padded(spec.vocab_size, VOCAB_MULTIPLE * tp)


def chunk_layers(spec: ModelSpec, par: MegatronParallel, pp_rank: int, chunk: int = 0) -> range:
    """The layers of the whole model in one chunk of one pipeline stage; UserError where they do not divide.

    Chunks are dealt out in turns: chunk 0 of every stage, then chunk 1 of every stage.
    """
    sizes = [share(n, par.vpp, "number of layers of a pipeline stage") for n in _stage_sizes(spec, par)]
    start = chunk * sum(sizes) + sum(sizes[:pp_rank])
    return range(start, start + sizes[pp_rank])


def _stage_sizes(spec: ModelSpec, par: MegatronParallel) -> list[int]:
    """Layers of each pipeline stage."""
    given = (par.first_stage_layers, par.last_stage_layers)
    if par.pp == 1:
        if par.vpp > 1 or given != (None, None):
            raise UserError("model chunks and uneven stages need a pipeline: set pp to at least 2")
        return [spec.layers]
    first, last = ([] if n is None else [n] for n in given)
    rest, stages = spec.layers - sum(first) - sum(last), par.pp - len(first) - len(last)
    if rest < 0 or (rest > 0) != (stages > 0):
        raise UserError(
            f"{spec.layers} layers: {sum(first)} in the first and {sum(last)} in the last pipeline stage leave {rest} "
            f"for {stages} other stages"
        )
    middle = [share(rest, stages, "number of layers") if stages else 0] * stages
    return [*first, *middle, *last]


def megatron_layout(
    spec: ModelSpec, par: MegatronParallel, at: Coordinates, naming: Naming = LOCAL
) -> Layout:
    """What the rank at these coordinates holds. With several chunks, names begin with `chunk0.`, `chunk1.`, ...

    UserError where heads, query groups, MLP width, experts or layers do not divide as megatron-core needs.
    """
    _check_heads(spec, par.tp)
    stacks: dict[str, Stack] = {}
    experts = _experts_of(spec, par, at.ep)
    for chunk in range(par.vpp):
        layers = chunk_layers(spec, par, at.pp, chunk)
        prefix = f"chunk{chunk}." if par.vpp > 1 else ""
        for weight in _chunk_weights(spec, par, at.pp, chunk, layers):
            if weight.expert is not None and weight.expert not in experts:
                continue
            name = prefix + _local_name(spec, weight, layers, experts, naming)
            tp, rank = (par.tp, at.tp) if weight.expert is None else (par.expert_tp, at.etp)
            stacks[name] = _CUTS[weight.kind](spec, weight, tp, rank)
    return as_layout(stacks)


@without_collector()
def megatron_layouts(spec: ModelSpec, par: MegatronParallel, dp: int, naming: Naming = LOCAL) -> list[Layout]:
    """Layouts of all trainer ranks in megatron-core's order; replicas share one object.

    Ranks count tensor first, then data, then pipeline. The experts cut the tensor and data ranks of a stage anew:
    expert tensor first, then expert, then replicas.
    """
    block = par.tp * dp
    if block % (par.expert_tp * par.ep):
        raise UserError(
            f"{block} ranks a pipeline stage (tp {par.tp} x dp {dp}) are no multiple of expert tensor parallel size "
            f"{par.expert_tp} x expert parallel size {par.ep}"
        )
    made: dict[Coordinates, Layout] = {}
    world = []
    for rank in range(block * par.pp):
        at = coordinates(spec, par, dp, rank)
        if at not in made:
            made[at] = megatron_layout(spec, par, at, naming)
        world.append(made[at])
    return world


def coordinates(spec: ModelSpec, par: MegatronParallel, dp: int, rank: int) -> Coordinates:
    """Of a global rank; a dense model has no experts to tell ranks apart by."""
    pp_rank, i = divmod(rank, par.tp * dp)
    if spec.moe is None:
        return Coordinates(i % par.tp, pp_rank)
    return Coordinates(i % par.tp, pp_rank, i // par.expert_tp % par.ep, i % par.expert_tp)


def _check_heads(spec: ModelSpec, tp: int) -> None:
    share(spec.heads, tp, f"{spec.family}: number of attention heads")
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise UserError(
            f"{spec.family}: {spec.kv_heads} key-value heads and tensor parallel size {tp}: "
            "one must be a multiple of the other"
        )


def _chunk_weights(
    spec: ModelSpec, par: MegatronParallel, pp_rank: int, chunk: int, layers: range
) -> Iterator[Weight]:
    """The weights of one chunk, those of all its experts among them."""
    by_place = weights_by_place(spec)
    if (pp_rank, chunk) == (0, 0):
        yield from by_place["embedding"]
    for layer in layers:
        yield from by_place[layer]
    if (pp_rank, chunk) == (par.pp - 1, par.vpp - 1):
        # A tied head is the embedding itself where one stage has both; else the last stage keeps its own copy.
        shared = spec.tied and par.pp == 1
        yield from (weight for weight in by_place["head"] if not (shared and weight.kind == "vocab"))


def _experts_of(spec: ModelSpec, par: MegatronParallel, ep_rank: int) -> range:
    """Numbers of the rank's experts; none in a dense model."""
    if spec.moe is None:
        return range(0)
    each = share(spec.moe.experts, par.ep, f"{spec.family}: number of experts")
    return range(ep_rank * each, (ep_rank + 1) * each)


def _local_name(spec: ModelSpec, weight: Weight, layers: range, experts: range, naming: Naming) -> str:
    if not isinstance(weight.place, int):
        return weight.megatron
    name = weight.megatron
    if naming.te:
        for local, fused in _TE_NORMS.items():
            if local == "input_layernorm.weight" or not spec.has_experts(weight.place):
                name = name.replace("{layer}." + local, "{layer}." + fused)
    if weight.expert is not None:
        if naming.grouped:  # local_experts.3.linear_fc1.weight -> linear_fc1.weight3
            name = name.replace("local_experts.{expert}.", "") + "{expert}"
        name = name.replace("{expert}", str(weight.expert - experts.start))
    return name.replace("{layer}", str(weight.place - layers.start))


def _qkv(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    """Rows interleaved by query group, [q heads of the group; its k head; its v head], then cut into tp equal
    intervals. With fewer groups than ranks a cut goes through a group, and some ranks hold no k or v at all."""
    total = sum(height(box) for _, box in weight.canonical)
    each = share(total, tp, f"{weight.megatron}: number of rows")
    return Stack(list(_query_groups(spec, weight)), (rank * each, (rank + 1) * each))


def _query_groups(spec: ModelSpec, weight: Weight) -> Iterator[tuple[str, Box]]:
    for group in range(spec.kv_heads):
        for tensor, box in weight.canonical:
            each = height(box) // spec.kv_heads
            yield tensor, rows(box, group * each, (group + 1) * each)


def _vocab(spec: ModelSpec, weight: Weight, tp: int, rank: int) -> Stack:
    return vocab(VOCAB_MULTIPLE * tp)(spec, weight, tp, rank)


_CUTS: dict[Kind, Cut] = {
    "replicated": replicated,
    "vocab": _vocab,
    "columns": columns,
    "gate_up": gate_up,
    "qkv": _qkv,
}
