"""Stock megatron-core on ranks that are processes of this machine: GPTModels as its own layer specs build them.

The ranks are forks of one process that has imported everything: the imports take longer than all else.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from grpo_mlm.engine.device import open_device
from grpo_mlm.layouts.megatron import MegatronParallel, padded_vocab
from grpo_mlm.layouts.model import ModelSpec

WORLD = 4
DEADLINE_S = 120


_rank, _meeting = 0, Path()  # of this process: its rank, and a file name for its next rendezvous


@contextmanager
def stock_ranks(folder: Path) -> Iterator[Callable[..., list[Any]]]:
    """Inside the block, call the value with a job and its arguments: it runs on all ranks as `job(*args)`.

    `folder` is for the rendezvous. A job must enter `groups`, where a rank waits for all others.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    calls = count()
    with ProcessPoolExecutor(WORLD, mp_context=context) as pool:

        def run(job: Callable[..., Any], *args: Any) -> list[Any]:
            meeting = folder / f"call{next(calls)}"
            futures = [pool.submit(_run, rank, meeting, job, args) for rank in range(WORLD)]
            return [future.result(DEADLINE_S) for future in futures]

        yield run


def _run(rank: int, meeting: Path, job: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    global _rank, _meeting
    _rank, _meeting = rank, meeting
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), open_device("cpu").active():
            return job(*args)
    except Exception as error:
        raise AssertionError(traceback.format_exc()) from error


@contextmanager
def groups(par: MegatronParallel) -> Iterator[None]:
    """All process groups, made anew; ranks that the sizes leave over are replicas."""
    global _meeting
    _meeting = _meeting.with_name(_meeting.name + "+")
    # gloo's own choice of an interface may take a name lookup that fails
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{_meeting}",
        rank=_rank,
        world_size=WORLD,
        timeout=timedelta(seconds=DEADLINE_S / 2),
    )
    parallel_state.initialize_model_parallel(
        par.tp,
        par.pp,
        par.vpp if par.vpp > 1 else None,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.expert_tp,
        create_gloo_process_groups=False,
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def chunks(spec: ModelSpec, par: MegatronParallel, te_names: bool = False) -> list[GPTModel]:
    """This rank's model chunks, all weights NaN. `te_names`: norms are stored under the names that megatron-core's
    Transformer Engine layer spec gives them where layers have experts."""
    config = _config(spec, par)
    models = []
    for chunk in range(par.vpp):
        at = {"ignore_virtual": False, "vp_stage": chunk} if par.vpp > 1 else {}
        layer = get_gpt_layer_local_spec(
            num_experts=spec.moe.experts if spec.moe else None,
            qk_layernorm=spec.qk_norm,
            normalization="RMSNorm",
        )
        if te_names:
            del layer.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        model = GPTModel(
            config,
            layer,
            vocab_size=padded_vocab(spec, par.tp),
            max_sequence_length=spec.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            parallel_output=False,
            position_embedding_type="rope",
            rotary_base=int(spec.rope.theta),
            share_embeddings_and_output_weights=spec.tied,
            vp_stage=chunk if par.vpp > 1 else None,
        ).eval()
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        models.append(model)
    return models


def _config(spec: ModelSpec, par: MegatronParallel) -> TransformerConfig:
    moe_utils.te_general_gemm = None  # without Transformer Engine, megatron-core 0.16 forgets to define it
    experts: dict[str, Any] = {}
    if spec.moe:
        experts = {
            "num_moe_experts": spec.moe.experts,
            "moe_ffn_hidden_size": spec.moe.ffn,
            "moe_router_topk": spec.moe.top_k,
            "moe_router_pre_softmax": not spec.moe.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
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
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=par.tp,
        pipeline_model_parallel_size=par.pp,
        virtual_pipeline_model_parallel_size=par.vpp if par.vpp > 1 else None,
        num_layers_in_first_pipeline_stage=par.first_stage_layers,
        num_layers_in_last_pipeline_stage=par.last_stage_layers,
        expert_model_parallel_size=par.ep,
        expert_tensor_parallel_size=par.expert_tp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        **experts,
    )


def _state(models: list[GPTModel], metadata: dict[str, Any] | None) -> dict[str, Any]:
    return {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(models)}


def load(models: list[GPTModel], folder: Path, metadata: dict[str, Any] | None = None) -> None:
    """By megatron-core's own loader; every weight must be in the checkpoint."""
    loaded = dist_checkpointing.load(_state(models, metadata), str(folder))
    for i, model in enumerate(models):
        model.load_state_dict(loaded[f"model{i}"], strict=True)
        for name, parameter in model.named_parameters():
            assert not parameter.isnan().any(), name


def save(models: list[GPTModel], folder: Path, metadata: dict[str, Any] | None = None) -> None:
    """By megatron-core's own writer."""
    if _rank == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(models, metadata), str(folder))


def logits(model: GPTModel, tokens: Tensor) -> Tensor | None:
    """Of one pipeline of single chunks, `[batch, length, padded vocabulary]` on ranks of the last stage."""
    batch, length = tokens.shape
    if not model.pre_process:
        hidden = torch.empty(length, batch, model.config.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    positions = torch.arange(length).expand(batch, -1)
    masked = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    out = model(tokens, positions, masked)
    if model.post_process:
        return out
    dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None
