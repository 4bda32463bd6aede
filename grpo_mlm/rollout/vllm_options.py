"""What vLLM is told: by its environment, its engine arguments and the parameters of a request."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_mlm.config.schema import Config
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.known_tokens import known_tokens
from grpo_mlm.layouts.model import read_model_spec
from grpo_mlm.rollout.request import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

CPU_STEP_TOKENS = 8192  # that a step may compute, where the config says nothing
CPU_BLOCK_TOKENS = 32  # of the KV cache: the least that the CPU's attention runs well with


def prepare_environment(config: Config, on_cpu: bool) -> None:
    """What vLLM and torch read when they are imported; call it before either is.

    The engine core lives in this process. Without GPUs nothing is compiled: it starts in 9 s instead of 30.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads, which a fork would break
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if on_cpu:
        os.environ["OMP_NUM_THREADS"] = str(config.cluster.threads_per_worker)
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


def engine_arguments(config: Config, model_folder: Path, on_cpu: bool) -> dict[str, Any]:
    """vLLM's engine arguments for this configuration."""
    rollout, data = config.rollout, config.data
    length = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    arguments: dict[str, Any] = {
        "model": str(model_folder),
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": rollout.dtype or config.actor.dtype,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "max_model_len": length,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enforce_eager": rollout.enforce_eager or on_cpu,
        "seed": 0,  # never used: every request brings its own
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled, temperature included
        "generation_config": "vllm",  # the model's generation_config.json has no say
        "weight_transfer_config": {"backend": "grpo_mlm"},
        "worker_extension_cls": "grpo_mlm.rollout.weight_transfer.WorkerExtension",
        "distributed_executor_backend": "mp" if rollout.tensor_model_parallel_size > 1 else "uni",
        "disable_log_stats": True,
    }
    if known_tokens(model_folder) < read_model_spec(model_folder).vocab_size:
        arguments["logits_processors"] = ["grpo_mlm.rollout.vocabulary:KnownTokens"]
    if not on_cpu:
        gives_memory_up = config.cluster.placement == "colocated"
        return arguments | {
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "enable_sleep_mode": gives_memory_up,
        }
    # A seeded request whose prompt is split over steps would rewind its generator, which a CPU generator cannot:
    # prompts are computed whole, and a step has room for the longest.
    budget = max(rollout.max_num_batched_tokens or CPU_STEP_TOKENS, length, rollout.max_num_seqs)
    return arguments | {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": budget,
        "kv_cache_memory_bytes": math.ceil(rollout.kv_cache_gb * 2**30),
        "block_size": CPU_BLOCK_TOKENS,
    }


def sampling_params(sampling: Sampling, seed: int, stop_token_ids: list[int]) -> SamplingParams:
    """Every field that changes what is sampled is stated, so no default of model or engine can leak in.

    A stop token stays in the ids. A stop string stays in the text, which ends with it; the ids end with the token
    that completed it, whole.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
        seed=seed,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        stop_token_ids=stop_token_ids,
        ignore_eos=False,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        logprobs=0,
        skip_special_tokens=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def end_tokens(model_folder: Path) -> list[int]:
    """Ids that end a response besides the tokenizer's end-of-sequence: chat models list several."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = model_folder / name
        try:
            ids = json.loads(path.read_text()).get("eos_token_id") if path.exists() else None
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a JSON object: {error}") from error
        ends.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return sorted(ends)
