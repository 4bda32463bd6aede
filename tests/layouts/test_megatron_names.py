"""Names and shapes of the Megatron view against the parameters of real GPTModels.

A fake process group gives one process any rank of any world, and the model is built on the meta device, so no
process is spawned and no byte is allocated.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_mlm.layouts.megatron import MegatronParallel, megatron_layouts, padded_vocab
from grpo_mlm.layouts.model import ModelSpec, Rope

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
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)


def gpt_shapes(spec: ModelSpec, par: MegatronParallel, dp: int, rank: int) -> dict[str, tuple[int, ...]]:
    """Parameter names and shapes of the GPTModel that `rank` of a world of tp * pp * dp builds."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=par.tp * par.pp * dp)
    try:
        parallel_state.initialize_model_parallel(par.tp, par.pp, create_gloo_process_groups=False)
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
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        with torch.device("meta"):
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(qk_layernorm=spec.qk_norm, normalization="RMSNorm"),
                vocab_size=padded_vocab(spec, par.tp),
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(),
                post_process=parallel_state.is_pipeline_last_stage(),
                position_embedding_type="rope",
                share_embeddings_and_output_weights=spec.tied,
            )
        return {name: tuple(p.shape) for name, p in model.named_parameters()}
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


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
