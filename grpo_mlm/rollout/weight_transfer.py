"""How an engine rank takes its slices: a weight-transfer engine of ours behind vLLM's own interface.

Start, update, finish run inside each worker. The slices go through vLLM's layerwise reload, which also lays
weights out anew for kernels that need it, but with a plain copy in place of the loaders that would slice a full
tensor. vLLM resolves `worker_extension_cls` before it makes the engine, so importing this module registers it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.platforms import current_platform

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import receive, schedule
from grpo_mlm.errors import RunFailure

BACKEND = "grpo_mlm"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Where the ranks meet, and what each of them needs to build the plan."""

    host: str
    port: int
    first_rank: int  # of this engine's first rank in the joint group
    world: int
    engine: int
    bucket_bytes: int
    timeout_s: float
    shape: dict[str, Any]


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: the plan says what comes."""


class ShardedTransferEngine(WeightTransferEngine[JoinInfo, UpdateInfo]):
    """One engine rank's end of the bridge."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    group: dist.ProcessGroup | None = None
    digest = ""
    received = 0  # bytes of the last update
    _open = False  # an update has begun and not ended

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Build the plan, check it against the live model, join the group."""
        shape = SyncShape(**init_info.shape)
        plan = shape.plan()
        tp_rank = self.parallel_config.rank
        self.destination = init_info.engine * shape.rollout_tp + tp_rank
        self.layout = plan.destinations[self.destination]
        self.dtype = cast(torch.dtype, self.model_config.dtype)
        self.order = schedule(plan, self.dtype.itemsize, init_info.bucket_bytes)
        self.digest = plan.digest
        check_shapes(self.layout.shapes, expected_shapes(self.model))
        self.group = bridge_group.join(
            init_info.host,
            init_info.port,
            init_info.first_rank + tp_rank,
            init_info.world,
            self.device,
            init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Put the model into loading state. After an update that broke off, that state is ended first."""
        if self._open:
            end_reload(self.model, self.model_config)
        self._open = True
        initialize_layerwise_reload(self.model)
        self._loaders: list[tuple[Any, Any]] = []

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take every tensor of this rank, each into its layer as soon as it is whole."""
        assert self.group is not None
        self.received = 0
        with set_current_vllm_config(self.vllm_config):
            for name, tensor in receive(
                self.order, self.destination, self.layout, self.dtype, self.device, self.group
            ):
                self._load(name, tensor)
                self.received += tensor.nbytes

    def _load(self, name: str, tensor: Tensor) -> None:
        module, _, leaf = name.rpartition(".")
        layer = self.model.get_submodule(module)
        param: Any = getattr(layer, leaf)
        # The recorded parameter is used again by the next update: its own loader comes back at the end.
        self._loaders.append((param, _get_original_loader(param)))
        param.weight_loader = _copy_whole
        param.weight_loader = make_online_process_loader(layer, leaf)
        param.weight_loader(param, tensor)

    def finish_weight_update(self) -> None:
        """Leave the loading state; the new weights are live."""
        with torch.no_grad():
            end_reload(self.model, self.model_config)
        for param, loader in self._loaders:
            param.weight_loader = loader
        self._open = False

    def shutdown(self) -> None:
        self.group = None


def _copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def end_reload(model: nn.Module, model_config: Any) -> None:
    """vLLM's finalize, and what its CPU build forgets: a tied head keeps a packed copy of the old embedding."""
    finalize_layerwise_reload(model, model_config)
    if current_platform.is_cpu():
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in model.modules():
            if isinstance(module, ParallelLMHead) and isinstance(
                module.quant_method, UnquantizedEmbeddingMethod
            ):
                dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def expected_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter as it is loaded, which a kernel's own layout may hide in the live model.

    A tied head is an alias of the embedding and is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        recorded, _ = get_layerwise_info(module).restore_metadata
        for leaf, live in module._parameters.items():
            if live is None or id(live) in seen:
                continue
            seen.add(id(live))
            shapes[f"{prefix}.{leaf}"] = tuple(recorded.get(leaf, live).shape)
    return shapes


def check_shapes(planned: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    """RunFailure listing every name or shape on which the plan and the engine's model differ."""
    faults = [f"{name}: in the engine, not in the plan" for name in sorted(expected.keys() - planned.keys())]
    faults += [f"{name}: in the plan, not in the engine" for name in sorted(planned.keys() - expected.keys())]
    faults += [
        f"{name}: {planned[name]} planned, {expected[name]} in the engine"
        for name in sorted(planned.keys() & expected.keys())
        if planned[name] != expected[name]
    ]
    if faults:
        raise RunFailure("the engine's weights are not those of the plan:\n  " + "\n  ".join(faults[:20]))


def join_request(info: JoinInfo) -> dict[str, Any]:
    """`info` as the plain dict that vLLM's call takes."""
    return asdict(info)


WeightTransferEngineFactory.register_engine(BACKEND, ShardedTransferEngine)


class WorkerExtension:
    """Mixed into vLLM's worker class; gives the driver what the transfer interface does not return."""

    def transfer_digest(self) -> str:
        return self.weight_transfer_engine.digest  # type: ignore[attr-defined]

    def transfer_received(self) -> int:
        return self.weight_transfer_engine.received  # type: ignore[attr-defined]
