"""Names and shapes of the Megatron view against the parameters and persistent buffers of real GPTModels.

A fake process group gives one process any rank of any world, and the model is built on the meta device, so no
process is spawned and no byte is allocated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts, padded_vocab
from grpo_mlm.layouts.model import ModelSpec, Rope
from grpo_mlm.layouts.spec import Moe

LLAMA = ModelSpec("llama", 64, 4, 8, 2, 32, 96, 300, False, False, False, False, 1e-5, Rope(1e4), 64)
MODELS = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3-tied": replace(LLAMA, family="qwen3", qk_norm=True, tied=True),
}


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tied copy of the last stage is moved to the current CUDA device on construction."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def gpt_shapes(spec: ModelSpec, par: MegatronParallel, dp: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Of the parameters and persistent buffers of the GPTModel that `rank` of a world of tp * pp * dp builds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=par.tp * par.pp * dp)
    try:
        parallel_state.initialize_model_parallel(
            par.tp,
            par.pp,
            par.vpp if par.vpp > 1 else None,
            expert_model_parallel_size=par.ep,
            expert_tensor_parallel_size=par.expert_tp,
            create_gloo_process_groups=False,
        )
        config = TransformerConfig(
            num_layers=spec.layers,
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.heads,
            num_query_groups=spec.kv_heads,
            kv_channels=spec.head_dim,
            ffn_hidden_size=spec.ffn,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=spec.qkv_bias,
            qk_layernorm=spec.qk_norm,
            tensor_model_parallel_size=par.tp,
            pipeline_model_parallel_size=par.pp,
            virtual_pipeline_model_parallel_size=par.vpp if par.vpp > 1 else None,
            num_layers_in_first_pipeline_stage=par.first_stage_layers,
            num_layers_in_last_pipeline_stage=par.last_stage_layers,
            expert_model_parallel_size=par.ep,
            expert_tensor_parallel_size=par.expert_tp,
            sequence_parallel=spec.moe is not None and par.tp > 1,
            **(moe_options(spec, spec.moe) if spec.moe else {}),
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        shapes: dict[str, tuple[int, ...]] = {}
        for chunk in range(par.vpp):
            prefix = f"chunk{chunk}." if par.vpp > 1 else ""
            model = gpt_chunk(spec, par, config, chunk)
            stored = model.state_dict().keys()
            buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in stored]
            shapes |= {prefix + name: tuple(x.shape) for name, x in [*model.named_parameters(), *buffers]}
        return shapes
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def moe_options(spec: ModelSpec, moe: Moe) -> dict[str, Any]:
    return {
        "num_moe_experts": moe.experts,
        "moe_layer_freq": [int(layer >= moe.dense_layers) for layer in range(spec.layers)],
        "moe_ffn_hidden_size": moe.ffn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_router_enable_expert_bias": moe.expert_bias,
        "moe_router_score_function": "sigmoid" if moe.expert_bias else "softmax",
        "moe_token_dispatcher_type": "alltoall",
    }


def gpt_chunk(spec: ModelSpec, par: MegatronParallel, config: TransformerConfig, chunk: int) -> GPTModel:
    at = {"ignore_virtual": False, "vp_stage": chunk} if par.vpp > 1 else {}
    layers = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=False,
        normalization="RMSNorm",
        vp_stage=chunk if par.vpp > 1 else None,
    )
    # The local spec's norm is not made for sequence parallelism; its parameters are.
    with torch.device("meta"), patch("megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__", _norm):
        return GPTModel(
            config,
            layers,
            vocab_size=padded_vocab(spec, par.tp),
            max_sequence_length=64,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=spec.tied,
            vp_stage=chunk if par.vpp > 1 else None,
        )


def _norm(
    cls: type, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
) -> torch.nn.Module:
    return torch.nn.RMSNorm(hidden_size, eps)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("model", MODELS)
def test_every_rank_names_and_shapes_its_parameters_as_gpt_model_does(
    model: str, sizes: tuple[int, int, int]
) -> None:
    """CNV-07: no parameter missing, none invented; tensor parallel 4 is more than the 2 query groups."""
    spec, (tp, pp, dp) = MODELS[model], sizes
    par = MegatronParallel(tp, pp)
    for rank, layout in enumerate(megatron_layouts(spec, par, dp)):
        assert layout.shapes == gpt_shapes(spec, par, dp, rank), f"rank {rank}"


MOE = replace(
    LLAMA, family="qwen3_moe", qk_norm=True, moe=Moe(experts=8, top_k=2, ffn=48, norm_topk_prob=True)
)

DOTS1 = replace(MOE, family="dots1", moe=Moe(8, 2, 48, True, shared_ffn=32, dense_layers=1, expert_bias=True))


@pytest.mark.parametrize(
    ("spec", "par", "dp"),
    [
        (LLAMA, MegatronParallel(pp=2, vpp=2), 1),
        (MODELS["qwen3-tied"], MegatronParallel(tp=2, pp=2, vpp=2), 1),
        (LLAMA, MegatronParallel(pp=2, first_stage_layers=1), 1),
        (
            replace(LLAMA, layers=8),
            MegatronParallel(pp=3, vpp=2, first_stage_layers=2, last_stage_layers=2),
            1,
        ),
        (MOE, MegatronParallel(), 1),
        (MOE, MegatronParallel(ep=4), 4),
        (MOE, MegatronParallel(tp=2, ep=2), 2),
        (MOE, MegatronParallel(tp=2, ep=2, etp=1), 1),
        (MOE, MegatronParallel(tp=2, pp=2, ep=4, etp=1), 2),
        (replace(MOE, tied=True), MegatronParallel(tp=4, pp=2, vpp=2, ep=2, etp=2), 1),
        (DOTS1, MegatronParallel(), 1),
        (DOTS1, MegatronParallel(tp=2, ep=2, etp=1), 1),
        (DOTS1, MegatronParallel(tp=4, pp=2, vpp=2, ep=4, etp=2), 2),
        (
            replace(DOTS1, layers=6),
            MegatronParallel(tp=2, pp=3, ep=4, etp=1, first_stage_layers=1, last_stage_layers=2),
            2,
        ),
    ],
)
def test_chunks_stages_and_experts_are_those_of_gpt_model(
    spec: ModelSpec, par: MegatronParallel, dp: int
) -> None:
    """CNV-03, CNV-04: which layers and how many experts each rank has, under which names."""
    for rank, layout in enumerate(megatron_layouts(spec, par, dp)):
        assert layout.shapes == gpt_shapes(spec, par, dp, rank), f"rank {rank}"
