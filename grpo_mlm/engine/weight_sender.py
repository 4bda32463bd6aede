"""The trainer's end of the bridge to the rollout engines."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.buckets import schedule
from grpo_mlm.bridge.channel import Listener
from grpo_mlm.bridge.checksums import Verify
from grpo_mlm.bridge.handoff import Outbox
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import send
from grpo_mlm.config.schema import Config
from grpo_mlm.engine.device import Device
from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout


class WeightSender:
    """One trainer rank: its place in the joint group, what it sends there, and what it hands to its own device."""

    def __init__(self, config: Config, shape: SyncShape, rank: int, device: Device, layout: Layout) -> None:
        """`layout` is what the rank really holds; RunFailure where the plan sees it otherwise."""
        self.shape, self.rank, self.device = shape, rank, device
        self.verify_mode = config.bridge.verify
        self.timeout_s = config.cluster.call_timeout_s
        self.layout = layout
        if shape.plan.sources[rank] != layout:
            raise RunFailure(f"trainer rank {rank} holds other weights than the plan of the sync says")
        self.here = (
            rank if shape.colocated and rank < shape.engine_ranks else None
        )  # destination on this device
        checked = self.verify_mode != "off"
        bucket_bytes = config.bridge.bucket_mb << 20
        self.order = schedule(shape.plan, shape.dtypes, bucket_bytes, rank, self.here, checked)
        self.outbox: Outbox | None = None

    def join(
        self,
        host: str,
        port: int,
        store: dist.Store | None,
        listener: Listener | None,
        start_timeout_s: float,
    ) -> None:
        """Enter the joint group; `store` on the rank that holds it, `listener` where an engine rank is to connect."""
        self.group = bridge_group.join(
            host, port, self.rank, self.shape.group_size, self.device.torch_device, self.timeout_s, store
        )
        if self.here is not None:
            assert listener is not None, "open_handoff comes first"
            peer = f"engine rank {self.here}, on the device of trainer rank {self.rank},"
            channel = listener.accept(peer, start_timeout_s)
            channel.set_timeout(self.timeout_s)
            largest = max((bucket.nbytes for bucket in self.order if bucket.dst == self.here), default=1)
            self.outbox = Outbox(channel, largest, self.device.torch_device)

    def send(self, params: Mapping[str, Tensor], version: int) -> int:
        """Send every engine rank its pieces of these weights; returns the bytes of them."""
        held = {name: params[name].view(shape) for name, shape in self.layout.shapes.items()}
        verify = Verify(self.verify_mode, version)
        return send(
            self.order, self.rank, held, self.group, self.shape.first_destination, verify, self.outbox
        )

    def leave(self) -> None:
        """End the connections; whoever waits for this rank hears of it."""
        if hasattr(self, "group"):
            self.group.close()
        if self.outbox is not None:
            self.outbox.close()
