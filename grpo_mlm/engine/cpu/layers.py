"""Transformer layers on CPUs: megatron-core's local spec with the parts of this folder in it."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.cpu.attention import PackedAttention
from grpo_mlm.engine.cpu.norm import RMSNorm
from grpo_mlm.engine.cpu.segments import PackedSegments, packed_segments
from grpo_mlm.engine.cpu.swiglu import SwiGLU
from grpo_mlm.engine.layers import Layers, with_output_bias
from grpo_mlm.engine.rope import inverse_frequencies
from grpo_mlm.layouts.model import ModelSpec


def cpu_layers(spec: ModelSpec, dtype: torch.dtype) -> Layers:
    """Layers of `spec` in the precision `dtype`."""
    frequencies = inverse_frequencies(spec.rope, spec.head_dim)

    def packed(pack: PackedSequences) -> PackedSegments:
        return packed_segments(pack.cu_seqlens, pack.position_ids, frequencies, dtype)

    def stage(config: TransformerConfig) -> TransformerBlockSubmodules:
        layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
        layer.submodules.mlp.submodules.activation_func = SwiGLU
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = PackedAttention
        if spec.qk_norm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
        if spec.o_bias:
            with_output_bias(attention)
        return TransformerBlockSubmodules([layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)

    settings = {
        "use_cpu_initialization": True,
        "batch_p2p_sync": False,
        # megatron's name for "the activation is a module of the spec".
        "use_te_activation_func": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
    return Layers(stage, packed, settings, rotary="none")
