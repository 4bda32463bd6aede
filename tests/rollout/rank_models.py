"""vLLM models without an engine: one process a rank, in the process groups that an engine would make.

One process imports vLLM, the ranks are forks of it: the import takes longer than everything else.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from grpo_mlm.layouts.config_json import read_config_json
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec
from grpo_mlm.layouts.packed import pack_layout
from tests.bridge.joint import fill

ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Job:
    """A model of a rank: a folder with a config.json, and the sizes."""

    folder: Path
    tp: int
    ep: bool = False


def vllm_process() -> ProcessPoolExecutor:
    """One process that imports vLLM."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=spawn, initializer=_import_vllm)


def _import_vllm() -> None:
    os.environ.update(ENVIRONMENT)
    import grpo_mlm.rollout.recorder  # noqa: F401


def record_on_ranks(jobs: list[Job], meeting: Path) -> dict[tuple[Job, int], dict[str, Any]]:
    """What `_record` says of each job's ranks; they find each other in `meeting`, an empty folder.

    Runs in a `vllm_process`.
    """
    _import_models({read_config_json(job.folder)["architectures"][0] for job in jobs})
    found = {}
    fork = multiprocessing.get_context("fork")
    for tp in sorted({job.tp for job in jobs}):
        mine = [job for job in jobs if job.tp == tp]
        with ProcessPoolExecutor(tp, mp_context=fork) as ranks:
            answers = [ranks.submit(_rank, mine, tp, rank, meeting) for rank in range(tp)]
            for rank, answer in enumerate(answers):
                found |= {(job, rank): said for job, said in zip(mine, answer.result(), strict=True)}
    return found


def _import_models(architectures: set[str]) -> None:
    """vLLM would start a process for each, which imports it too, to ask what the class can do."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in architectures:
        known: Any = ModelRegistry.models[name]
        ModelRegistry.register_model(name, known.load_model_cls())


def _rank(jobs: list[Job], tp: int, rank: int, meeting: Path) -> list[dict[str, Any]]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    os.environ["VLLM_DIST_IDENT"] = str(
        rank
    )  # names that differ: no shared memory, which nothing here would use
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(tp, rank, f"file://{meeting}/{tp}", rank, "gloo")
        initialize_model_parallel(tp)
    return [_record(job) for job in jobs]


def _record(job: Job) -> dict[str, Any]:
    """The recorded layout, packed, and the parameters that it fills otherwise than the model's own loaders."""
    from grpo_mlm.rollout.recorder import record_layout

    canonical = canonical_tensors(read_model_spec(job.folder))
    # The map of experts to ranks, which loaders read, cannot be without data.
    recorded = record_layout(_build(job, "cpu" if job.ep else "meta"), canonical, torch.float32)
    values = {name: torch.rand(shape) for name, shape in canonical.items()}
    model: Any = _build(job, "cpu")
    model.load_weights(iter(values.items()))
    loaded = dict(model.named_parameters())
    ours = fill(recorded, values)
    wrong = [
        name for name, tensor in ours.items() if not torch.equal(tensor, loaded[name].view(tensor.shape))
    ]
    return {"layout": pack_layout(recorded), "wrong": wrong, "unknown": sorted(loaded.keys() ^ ours.keys())}


def _build(job: Job, device: str) -> nn.Module:
    """The model that an engine would build, with parameters that nothing has been loaded into."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(job.folder),
        dtype="float32",
        enable_expert_parallel=job.ep,
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
        tensor_parallel_size=job.tp,
    ).create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32), torch.device(device):
        return initialize_model(config)
