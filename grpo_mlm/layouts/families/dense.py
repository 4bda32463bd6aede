"""What the dense families share: a pre-norm decoder with grouped-query attention and a gated MLP.

Names on the three sides are those of transformers' LlamaForCausalLM and its kin, megatron-core's GPTModel with
the local layer spec, and vLLM's checkpoint layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from grpo_mlm.errors import UserError
from grpo_mlm.layouts.config_json import read_rope, real, refuse_unsupported, switch, whole
from grpo_mlm.layouts.spec import ModelSpec
from grpo_mlm.layouts.weights import Kind, Shape, Weight


def dense_spec(
    config: dict[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
) -> ModelSpec:
    """The spec of a dense decoder; `head_dim` is the family's default, None for hidden size / heads."""
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
        norm_eps=real(config, "rms_norm_eps", 1e-6),
        rope=read_rope(config),
        max_position_embeddings=whole(config, "max_position_embeddings"),
    )


def dense_weights(spec: ModelSpec) -> Iterator[Weight]:
    """Every weight of the model, in the order of computation."""
    table = (spec.vocab_size, spec.hidden_size)
    embedding, norm = "model.embed_tokens.weight", "model.norm.weight"
    head = embedding if spec.tied else "lm_head.weight"
    yield Weight("vocab", "embedding", ((embedding, table),), "embedding.word_embeddings.weight", embedding)
    for layer in range(spec.layers):
        yield from _attention(spec, layer)
        yield from _mlp(spec, layer)
    norm_shape = (spec.hidden_size,)
    yield Weight("replicated", "head", ((norm, norm_shape),), "decoder.final_layernorm.weight", norm)
    yield Weight("vocab", "head", ((head, table),), "output_layer.weight", "lm_head.weight")


def _weight(kind: Kind, layer: int, hf: Mapping[str, Shape], megatron: str, vllm: str) -> Weight:
    """A weight of one layer; names are given without the layer's prefix."""
    prefix = f"model.layers.{layer}."
    canonical = tuple((prefix + name, shape) for name, shape in hf.items())
    return Weight(kind, layer, canonical, "decoder.layers.{layer}." + megatron, prefix + vllm)


def _attention(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {"q": q, "k": kv, "v": kv}
    norm, qkv, proj = "input_layernorm.weight", "self_attention.linear_qkv.", "self_attention.linear_proj."
    yield _weight("replicated", layer, {norm: (hidden,)}, norm, norm)
    matrices = {f"self_attn.{x}_proj.weight": (n, hidden) for x, n in sizes.items()}
    yield _weight("qkv", layer, matrices, qkv + "weight", "self_attn.qkv_proj.weight")
    if spec.qkv_bias:
        biases = {f"self_attn.{x}_proj.bias": (n,) for x, n in sizes.items()}
        yield _weight("qkv", layer, biases, qkv + "bias", "self_attn.qkv_proj.bias")
    if spec.qk_norm:
        for x in "qk":
            name = f"self_attn.{x}_norm.weight"
            local = f"self_attention.{x}_layernorm.weight"
            yield _weight("replicated", layer, {name: (spec.head_dim,)}, local, name)
    out = "self_attn.o_proj.weight"
    yield _weight("columns", layer, {out: (hidden, q)}, proj + "weight", out)
    if spec.o_bias:
        out = "self_attn.o_proj.bias"
        yield _weight("replicated", layer, {out: (hidden,)}, proj + "bias", out)


def _mlp(spec: ModelSpec, layer: int) -> Iterator[Weight]:
    hidden, ffn = spec.hidden_size, spec.ffn
    norm, down = "post_attention_layernorm.weight", "mlp.down_proj.weight"
    fused = {f"mlp.{x}_proj.weight": (ffn, hidden) for x in ("gate", "up")}
    yield _weight("replicated", layer, {norm: (hidden,)}, "pre_mlp_layernorm.weight", norm)
    yield _weight("gate_up", layer, fused, "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight")
    yield _weight("columns", layer, {down: (hidden, ffn)}, "mlp.linear_fc2.weight", down)
