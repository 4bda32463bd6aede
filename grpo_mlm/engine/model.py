"""Builds this rank's part of the model: stock megatron-core GPTModel whose last stage returns hidden states."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from grpo_mlm.engine.attention import PackedAttention
from grpo_mlm.engine.device import Device
from grpo_mlm.engine.parallel import Place
from grpo_mlm.engine.rope import inverse_frequencies
from grpo_mlm.layouts.megatron import padded_vocab
from grpo_mlm.layouts.model import ModelSpec


def build_model(spec: ModelSpec, place: Place, device: Device, dtype: torch.dtype) -> GPTModel:
    """This rank's stage and shard, weights not yet loaded. Every rank of the model must call it."""
    config = transformer_config(spec, place, device, dtype)
    device.check(config)
    model = GPTModel(
        config,
        _layer_spec(spec, device),
        vocab_size=padded_vocab(spec, place.tp),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=place.pp_rank == 0,
        post_process=place.last_stage,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=spec.tied,
    )
    model.rotary_pos_emb.inv_freq = inverse_frequencies(spec.rope, spec.head_dim).to(device.torch_device)
    if place.last_stage:
        # The kernels turn hidden states into log-probs; the head's weight stays a parameter of the model.
        model.output_layer.forward = _pass_through
    return model.to(device=device.torch_device, dtype=dtype)


def data_parallel(model: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    """The model with its gradient buffers: float32, summed over micro-batches and data-parallel ranks."""
    model.config.finalize_model_grads_func = _sum_gradients
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(model.config, settings, model)


def transformer_config(
    spec: ModelSpec, place: Place, device: Device, dtype: torch.dtype
) -> TransformerConfig:
    """megatron-core's configuration of the model; fields not named here keep its defaults."""
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden_size,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=spec.norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=place.tp,
        pipeline_model_parallel_size=place.pp,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Losses arrive with their denominators in, so gradients are summed and never averaged.
        calculate_per_token_loss=True,
        # Weights come from files.
        perform_initialization=False,
        use_cpu_initialization=device.is_cpu,
        # Packed micro-batches differ in length; with these megatron refuses its default dispatcher of experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        batch_p2p_sync=not device.is_cpu,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=not device.is_cpu,
        bias_activation_fusion=True,
        bias_dropout_fusion=not device.is_cpu,
    )


def head_weight(model: GPTModel) -> Tensor:
    """The matrix from hidden states to logits, `[padded vocabulary / tp, hidden]`; last stage only."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def _sum_gradients(model: list[DistributedDataParallel], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """megatron's own reduction without its last act, the division by a number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def _layer_spec(spec: ModelSpec, device: Device) -> ModuleSpec:
    if not device.is_cpu:
        layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=spec.qk_norm)
    else:
        layer = get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm")
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if spec.o_bias:
        attention = layer.submodules.self_attention.submodules
        attention.linear_proj = _with_bias(attention.linear_proj)
    return layer


def _with_bias(linear: type) -> type:
    """The same layer with a bias: megatron has one switch for the attention's output and the MLP's."""

    class WithBias(linear):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    return WithBias


def _pass_through(hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return hidden, None
