"""How an engine rank takes its slices: a weight-transfer engine of ours behind vLLM's own interface.

vLLM resolves `worker_extension_cls` before it makes the transfer engine, so importing this module registers it.
Everything here runs inside each of vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.assemble import Arrivals, Assembly
from grpo_mlm.bridge.buckets import schedule
from grpo_mlm.bridge.channel import connect
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.handoff import Inbox
from grpo_mlm.bridge.sync_plan import Recorded, SyncShape, check_shapes
from grpo_mlm.bridge.transfer import arrivals
from grpo_mlm.errors import PeerGone, RunFailure
from grpo_mlm.layouts.model import canonical_tensors, read_model_spec
from grpo_mlm.rollout.recorder import record_layout
from grpo_mlm.rollout.reload import Reload, checkpoint_parameters, loadable_shapes

BACKEND = "grpo_mlm"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Where the ranks meet, and what each of them needs to build the plan."""

    host: str
    port: int
    handoffs: list[
        str
    ]  # colocated: where each rank of this engine connects to the trainer rank on its device
    engine: int
    bucket_bytes: int
    verify: Literal["off", "sample", "full"]
    timeout_s: float
    shape: SyncShape


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """What comes is in the plan."""

    version: int


class ShardedTransferEngine(WeightTransferEngine[JoinInfo, UpdateInfo]):
    """One engine rank's end of the bridge."""

    init_info_cls = JoinInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    group: bridge_group.JointGroup | None = None
    inbox: Inbox | None = None
    counts: dict[str, int]  # of the last update
    _reload: Reload | None = None

    def record(self, model_folder: str) -> Recorded:
        """What this rank's loaders make of the tensors of a model folder."""
        dtype = cast(torch.dtype, self.model_config.dtype)
        canonical = canonical_tensors(read_model_spec(Path(model_folder)))
        with set_current_vllm_config(self.vllm_config):
            layout = record_layout(self.model, canonical, dtype)
        dtypes = {name: loaded.dtype for name, _, _, _, loaded in checkpoint_parameters(self.model)}
        return Recorded(layout, {name: dtypes[name] for name in layout.shapes})

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Build the plan, check it against the live model, meet the trainer."""
        self.shutdown()
        info, shape, rank = init_info, init_info.shape, self.parallel_config.rank
        self.destination = info.engine * shape.rollout_tp + rank
        self.mine = shape.destinations[self.destination]
        self.verify_mode = info.verify
        check_shapes(self.mine.layout.shapes, loadable_shapes(self.model))
        checked = info.verify != "off"
        self.order = schedule(
            shape.plan, shape.dtypes, info.bucket_bytes, dst=self.destination, checked=checked
        )
        if shape.colocated:
            peer = f"trainer rank {self.destination}, on the device of engine rank {self.destination},"
            self.inbox = Inbox(connect(info.handoffs[rank], peer, info.timeout_s), self.device)
        else:
            group_rank = shape.first_destination + self.destination
            self.group = bridge_group.join(
                info.host, info.port, group_rank, shape.group_size, self.device, info.timeout_s
            )

    def start_weight_update(self) -> None:
        """Put the model into loading state."""
        self._reload = Reload(self.model, self.model_config)

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take every tensor of this rank, each into its layer as soon as it is whole."""
        assert self._reload is not None
        verify = Verify(self.verify_mode, update_info.version)
        assembly = Assembly(self.mine.layout, self.mine.dtypes, self.device, verify)
        tensors = 0
        # Closed even when loading fails, so that the senders hear of it.
        with set_current_vllm_config(self.vllm_config), closing(assembly.tensors(self._arrivals())) as whole:
            for name, tensor in whole:
                self._reload.load(name, tensor)
                tensors += 1
        self.counts = {"tensors": tensors, "bytes": assembly.received, "verified": assembly.verified}

    def finish_weight_update(self) -> None:
        """Leave the loading state; the new weights are live."""
        reload, self._reload = self._reload, None
        if reload is not None:
            reload.finish()

    def shutdown(self) -> None:
        """Leave the trainer, which hears of it."""
        for connection in (self.group, self.inbox):
            if connection is not None:
                connection.close()
        self.group = self.inbox = None

    def _arrivals(self) -> Arrivals:
        if self.inbox is not None:
            return self.inbox.arrivals(self.order, self.destination)
        if self.group is None:
            raise RunFailure("this engine has not joined the trainer, or left it; both must join again")
        return arrivals(self.order, self.destination, self.device, self.group)


WeightTransferEngineFactory.register_engine(BACKEND, ShardedTransferEngine)


class WorkerExtension:
    """Mixed into vLLM's worker class: whole operations of the bridge as one call each.

    A failure is returned, not raised: vLLM's executor reads one reply a call from each worker, and after an
    exception it would take the other workers' replies for those of the next call.
    """

    def bridge_record(self, model_folder: str) -> dict[str, Any]:
        """Replies with this rank's recorded layout, packed."""
        worker: Any = self
        return _reply(lambda: worker.weight_transfer_engine.record(model_folder).packed())

    def bridge_join(self, info: dict[str, Any]) -> dict[str, Any]:
        """Join the trainer; replies with the digest of this rank's plan."""
        worker: Any = self

        def join() -> dict[str, Any]:
            worker.init_weight_transfer_engine(info)
            return {"digest": info["shape"].digest}

        return _reply(join)

    def bridge_receive(self, version: int) -> dict[str, Any]:
        """Take one whole update; replies with the numbers of tensors, bytes and checked pieces."""
        worker: Any = self

        def take() -> dict[str, Any]:
            worker.start_weight_update()
            worker.update_weights({"version": version})
            worker.finish_weight_update()
            counts: dict[str, int] = worker.weight_transfer_engine.counts
            return counts

        def give_up() -> dict[str, Any]:
            """Out of the loading state, with half-written weights: the next update can start from there."""
            worker._weight_update_active = False
            with set_current_vllm_config(worker.vllm_config):
                worker.weight_transfer_engine.finish_weight_update()
                worker.weight_transfer_engine.shutdown()
            return {}

        reply = _reply(take)
        if "error" in reply:
            then = _reply(give_up).get("error")
            reply["error"] += f"; then {then}" if then else ""
        return reply

    def bridge_leave(self) -> dict[str, Any]:
        """End the connections to the trainer; the weights stay as they are."""
        worker: Any = self

        def leave() -> dict[str, Any]:
            worker.weight_transfer_engine.shutdown()
            return {}

        return _reply(leave)


def _reply(operation: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return operation()
    except PeerGone as error:
        return {"error": str(error), "peer_gone": True}
    except RunFailure as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
