"""Transformer layers on GPUs: megatron-core's Transformer Engine spec, packed sequences by its own kernels."""

from __future__ import annotations

from importlib.util import find_spec

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig

from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.device import Device
from grpo_mlm.engine.layers import Layers, with_output_bias
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.model import ModelSpec


def te_layers(spec: ModelSpec, device: Device) -> Layers:
    """Layers of `spec` by Transformer Engine. RunFailure where it is not installed."""
    if find_spec("transformer_engine") is None:
        raise RunFailure("training on GPUs needs transformer-engine: pip install 'grpo_mlm[gpu]'")

    def stage(config: TransformerConfig) -> ModuleSpec:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
        if spec.o_bias:
            with_output_bias(layer.submodules.self_attention.submodules)
        return layer

    def packed(pack: PackedSequences) -> PackedSeqParams:
        lengths = pack.cu_seqlens.diff()
        # Exact, not an upper bound: megatron reads a rotary table as long as the pack as one row a token.
        longest = int(lengths.max())
        cu = pack.cu_seqlens.to(device.torch_device)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    settings = {"bias_activation_fusion": True, "bias_dropout_fusion": True, "apply_rope_fusion": True}
    return Layers(stage, packed, settings, rotary="rope")
