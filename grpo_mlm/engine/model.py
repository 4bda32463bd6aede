"""Builds this rank's part of the model: stock megatron-core GPTModel whose last stage returns hidden states."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn.functional import silu

from grpo_mlm.engine.device import Device
from grpo_mlm.engine.layers import Layers
from grpo_mlm.engine.parallel import Place
from grpo_mlm.engine.rope import inverse_frequencies
from grpo_mlm.layouts.megatron import padded_vocab
from grpo_mlm.layouts.model import ModelSpec


def build_model(
    spec: ModelSpec, place: Place, device: Device, layers: Layers, dtype: torch.dtype
) -> GPTModel:
    """This rank's stage and shard, weights not yet loaded. Every rank of the model must call it."""
    config = transformer_config(spec, place, layers, dtype)
    device.check(config)
    model = GPTModel(
        config,
        layers.stage(config),
        vocab_size=padded_vocab(spec, place.tp),
        max_sequence_length=spec.max_position_embeddings,
        pre_process=place.pp_rank == 0,
        post_process=place.last_stage,
        position_embedding_type=layers.rotary,
        share_embeddings_and_output_weights=spec.tied,
    )
    if layers.rotary == "rope":
        # GPTModel's arguments fix the constants of Llama 3.1's stretching; models state their own.
        model.rotary_pos_emb.inv_freq = inverse_frequencies(spec.rope, spec.head_dim)
    if place.last_stage:
        # The kernels turn hidden states into log-probs; the head's weight stays a parameter of the model.
        model.output_layer.forward = _pass_through
    model = model.to(device=device.torch_device, dtype=dtype)
    _mark_shards(model)
    return model


def transformer_config(
    spec: ModelSpec, place: Place, layers: Layers, dtype: torch.dtype
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
        perform_initialization=False,  # weights come from files
        # Packed micro-batches differ in length; with these megatron refuses its default dispatcher of experts.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        deallocate_pipeline_outputs=True,
        gradient_accumulation_fusion=False,  # would need apex
        masked_softmax_fusion=False,
        **layers.settings,
    )


def data_parallel(model: GPTModel, distributed_optimizer: bool) -> DistributedDataParallel:
    """The model with its gradient buffers: float32, summed over micro-batches and data-parallel ranks."""
    model.config.finalize_model_grads_func = _sum_gradients
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
    )
    return DistributedDataParallel(model.config, settings, model)


def head_weight(model: GPTModel) -> Tensor:
    """The matrix from hidden states to logits, `[padded vocabulary / tp, hidden]`; last stage only."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight


def _mark_shards(model: nn.Module) -> None:
    """Say which weights are cut over tensor ranks. megatron's initialisation would; without the marks the gradient
    norm takes the other ranks' shards for copies and leaves them out."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            cut = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None and not hasattr(module.weight, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(module.weight, True, cut, stride=1)


def _sum_gradients(model: list[DistributedDataParallel], num_tokens: Tensor | None, **kwargs: Any) -> None:
    """megatron's own reduction without its last act, the division by a number of tokens."""
    finalize_model_grads(model, None, **kwargs)


def _pass_through(hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
    return hidden, None
