"""The trainer's end of the bridge to the rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.bridge import group as bridge_group
from grpo_mlm.bridge.sync_plan import SyncShape
from grpo_mlm.bridge.transfer import schedule, send
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World
from grpo_mlm.engine.device import Device


class WeightSender:
    """One trainer rank in the joint group of trainer and engines, and what it sends there."""

    def __init__(self, config: Config, model_folder: Path, world: World, rank: int, device: Device) -> None:
        self.rank, self.device = rank, device
        self.dtype: torch.dtype = getattr(torch, config.rollout.dtype or config.actor.dtype)
        self.first_destination = world.actor_world
        self.timeout_s = config.cluster.call_timeout_s
        te = not device.is_cpu
        shape = SyncShape(
            str(model_folder), world.tp, world.pp, world.dp, te, world.rollout_tp, world.num_engines
        )
        plan = shape.plan()
        self.digest = plan.digest
        self.order = schedule(plan, self.dtype.itemsize, config.bridge.bucket_mb << 20)

    def join(self, host: str, port: int, size: int, store: dist.Store | None) -> None:
        """Enter the joint group of `size` ranks, the trainer's first; `store` on the rank that holds it."""
        self.group = bridge_group.join(
            host, port, self.rank, size, self.device.torch_device, self.timeout_s, store
        )

    def send(self, params: Mapping[str, Tensor]) -> int:
        """Send every engine rank its pieces of these weights; returns the bytes sent."""
        return send(self.order, self.rank, params, self.dtype, self.group, self.first_destination)
