"""What the dense families share: a pre-norm decoder with grouped-query attention and a gated MLP.

Names on the three sides are those of transformers' LlamaForCausalLM and its kin, megatron-core's GPTModel with
the local layer spec, and vLLM's checkpoint layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Box
from grpo_mlm.layouts.config_json import read_rope, real, refuse_unsupported, switch, whole
from grpo_mlm.layouts.spec import ModelSpec, Moe
from grpo_mlm.layouts.weights import Kind, Shape, Weight, full

LayerWeights = Callable[[ModelSpec, int], Iterator[Weight]]
"""(spec, layer) -> the weights of a part of one layer."""


def dense_spec(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    moe: Moe | None = None,
) -> ModelSpec:
    """The spec of a decoder. `head_dim` (None: hidden size / heads), `norm_eps` and `rope_theta` are what the family
    takes where config.json is silent."""
    refuse_unsupported(config)
    heads, hidden = whole(config, "num_attention_heads"), whole(config, "hidden_size")
    kv_heads = whole(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
        )
    return ModelSpec(
        family=config["model_type"],
        hidden_size=hidden,
        layers=whole(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=whole(config, "head_dim", head_dim or hidden // heads),
        ffn=whole(config, "intermediate_size"),
        vocab_size=whole(config, "vocab_size"),
        tied=switch(config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        qk_norm=qk_norm,
        norm_eps=real(config, "rms_norm_eps", norm_eps),
        rope=read_rope(config, rope_theta),
        max_position_embeddings=whole(config, "max_position_embeddings"),
        moe=moe,
    )


def dense_weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    return decoder_weights(spec, mlp)


def decoder_weights(
    spec: ModelSpec, feed_forward: LayerWeights, attend: LayerWeights | None = None
) -> Iterator[Weight]:
    """Embedding, layers, final norm and head; `feed_forward` and `attend` (the usual one if None) fill the layers."""
    table = full((spec.vocab_size, spec.hidden_size))
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    head = embedding if spec.tied else "lm_head.weight"
    yield Weight("vocab", "embedding", ((embedding, table),), "embedding.word_embeddings.weight", embedding)
    for layer in range(spec.layers):
        yield from (attend or attention)(spec, layer)
        yield from feed_forward(spec, layer)
    last = full((spec.hidden_size,))
    yield Weight("replicated", "head", ((norm, last),), "decoder.final_layernorm.weight", norm)
    yield Weight("vocab", "head", ((head, table),), "output_layer.weight", "lm_head.weight")


def layer_weight(
    kind: Kind, layer: int, hf: Mapping[str, Shape], megatron: str, vllm: str, expert: int | None = None
) -> Weight:
    """A weight of one layer made of whole tensors; names are given without the layer's prefix."""
    return layer_boxes(
        kind, layer, [(name, full(shape)) for name, shape in hf.items()], megatron, vllm, expert
    )


def layer_boxes(
    kind: Kind, layer: int, hf: Iterable[tuple[str, Box]], megatron: str, vllm: str, expert: int | None = None
) -> Weight:
    """A weight of one layer made of parts of tensors; names are given without the layer's prefix."""
    prefix = f"model.layers.{layer}."
    canonical = tuple((prefix + name, box) for name, box in hf)
    return Weight(kind, layer, canonical, "decoder.layers.{layer}." + megatron, prefix + vllm, expert)


def qkv_rows(spec: ModelSpec) -> dict[str, int]:
    """Rows of the q, k and v projections."""
    kv = spec.kv_heads * spec.head_dim
    return {"q": spec.heads * spec.head_dim, "k": kv, "v": kv}


def attention(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """The norm before attention, q, k and v as tensors of their own, and the output projection."""
    rows, hidden = qkv_rows(spec), spec.hidden_size
    qkv = "self_attention.linear_qkv."
    yield input_norm(spec, layer)
    matrices = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in rows.items()}
    yield layer_weight("qkv", layer, matrices, qkv + "weight", "self_attn.qkv_proj.weight")
    if spec.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": (n,) for x, n in rows.items()}
        yield layer_weight("qkv", layer, biases, qkv + "bias", "self_attn.qkv_proj.bias")
    if spec.qk_norm:
        for x in "qk":
            name = f"self_attn.{x}_norm.weight"
            local = f"self_attention.{x}_layernorm.weight"
            yield layer_weight("replicated", layer, {name: (spec.head_dim,)}, local, name)
    yield from output_projection(spec, layer)


def input_norm(spec: ModelSpec, layer: int) -> Weight:
    """The norm before attention."""
    norm = "input_layernorm.weight"
    return layer_weight("replicated", layer, {norm: (spec.hidden_size,)}, norm, norm)


def output_projection(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """What attention's heads go through together."""
    name, local = "self_attn.o_proj.", "self_attention.linear_proj."
    shape = (spec.hidden_size, spec.heads * spec.head_dim)
    yield layer_weight("columns", layer, {name + "weight": shape}, local + "weight", name + "weight")
    if spec.o_bias:
        bias = {name + "bias": (spec.hidden_size,)}
        yield layer_weight("replicated", layer, bias, local + "bias", name + "bias")


def mlp(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    """The norm before the MLP, its gate and up projections as tensors of their own, and its down projection."""
    yield mlp_norm(spec, layer)
    yield from gated_mlp(spec, layer, "mlp", spec.ffn)


def gated_mlp(spec: ModelSpec, layer: int, module: str, ffn: int, vllm: str = "") -> Iterator[Weight]:
    """Gate, up and down projections of an MLP of width `ffn`. `module` is its name, `vllm` that in vLLM if another."""
    fused = {f"{module}.{x}_proj.weight": (ffn, spec.hidden_size) for x in ("gate", "up")}
    theirs = f"{vllm or module}.gate_up_proj.weight"
    yield layer_weight("gate_up", layer, fused, f"{module}.linear_fc1.weight", theirs)
    yield down_projection(spec, layer, module, ffn, vllm)


def mlp_norm(spec: ModelSpec, layer: int) -> Weight:
    """The norm before the MLP or the experts."""
    norm = "post_attention_layernorm.weight"
    return layer_weight("replicated", layer, {norm: (spec.hidden_size,)}, "pre_mlp_layernorm.weight", norm)


def down_projection(spec: ModelSpec, layer: int, module: str, ffn: int, vllm: str = "") -> Weight:
    """The second matrix of an MLP, as for `gated_mlp`."""
    shapes = {f"{module}.down_proj.weight": (spec.hidden_size, ffn)}
    theirs = f"{vllm or module}.down_proj.weight"
    return layer_weight("columns", layer, shapes, f"{module}.linear_fc2.weight", theirs)
