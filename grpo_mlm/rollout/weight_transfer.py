"""How an engine rank takes its slices: a weight-transfer engine of ours behind vLLM's own interface.

vLLM resolves `worker_extension_cls` before it makes the transfer engine, so importing this module registers it.
Everything here runs inside each of vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.sync_plan import SyncShape, check_shapes
from grpo_mlm.bridge.transfer import receive, schedule
from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.reload import Reload, loadable_shapes

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

    group: bridge_group.JointGroup | None = None
    digest = ""
    tensors = received = 0  # of the last update; `received` in bytes
    _reload: Reload | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Build the plan, check it against the live model, join the group."""
        self.shutdown()
        shape = SyncShape(**init_info.shape)
        plan = shape.plan()
        tp_rank = self.parallel_config.rank
        self.destination = init_info.engine * shape.rollout_tp + tp_rank
        self.layout = plan.destinations[self.destination]
        self.dtype = cast(torch.dtype, self.model_config.dtype)
        self.order = schedule(plan, self.dtype.itemsize, init_info.bucket_bytes)
        self.digest = plan.digest
        check_shapes(self.layout.shapes, loadable_shapes(self.model))
        self.group = bridge_group.join(
            init_info.host,
            init_info.port,
            init_info.first_rank + tp_rank,
            init_info.world,
            self.device,
            init_info.timeout_s,
        )

    def start_weight_update(self) -> None:
        """Put the model into loading state."""
        self._reload = Reload(self.model, self.model_config)

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take every tensor of this rank, each into its layer as soon as it is whole."""
        if self.group is None:
            raise RunFailure("this engine has not joined the trainer")
        assert self._reload is not None
        self.tensors = self.received = 0
        arriving = receive(self.order, self.destination, self.layout, self.dtype, self.device, self.group)
        # Closed even when loading fails, so that the senders hear of it.
        with set_current_vllm_config(self.vllm_config), closing(arriving):
            for name, tensor in arriving:
                self._reload.load(name, tensor)
                self.tensors += 1
                self.received += tensor.nbytes

    def finish_weight_update(self) -> None:
        """Leave the loading state; the new weights are live."""
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.finish()

    def shutdown(self) -> None:
        """Leave the group."""
        if self.group is not None:
            self.group.close()
            self.group = None


WeightTransferEngineFactory.register_engine(BACKEND, ShardedTransferEngine)


class WorkerExtension:
    """Mixed into vLLM's worker class: whole operations of the bridge as one call each.

    A failure is returned, not raised: vLLM's executor reads one reply a call from each worker, and after an
    exception it would take the other workers' replies for those of the next call.
    """

    def bridge_join(self, info: dict[str, Any]) -> dict[str, Any]:
        """Join the trainer; replies with the digest of this rank's plan."""
        worker: Any = self

        def join() -> dict[str, Any]:
            worker.init_weight_transfer_engine(info)
            return {"digest": worker.weight_transfer_engine.digest}

        return _reply(join)

    def bridge_receive(self) -> dict[str, Any]:
        """Take one whole update; replies with the number of tensors and bytes."""
        worker: Any = self

        def take() -> dict[str, Any]:
            worker.start_weight_update()
            worker.update_weights({})
            worker.finish_weight_update()
            engine = worker.weight_transfer_engine
            return {"tensors": engine.tensors, "bytes": engine.received}

        def give_up() -> dict[str, Any]:
            """Out of the loading state, with half-written weights: the next update can start from there."""
            worker._weight_update_active = False
            with set_current_vllm_config(worker.vllm_config):
                worker.weight_transfer_engine.finish_weight_update()
            return {}

        reply = _reply(take)
        if "error" in reply:
            reply["error"] += "".join(f"; then {error}" for error in _reply(give_up).values())
        return reply


def _reply(operation: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return operation()
    except RunFailure as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
