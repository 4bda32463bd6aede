"""Process groups: how the trainer's ranks find each other, and who each one is."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_mlm.config.world import World
from grpo_mlm.engine.device import Device


@dataclass(frozen=True)
class Place:
    """One rank's coordinates. Ranks count tensor first, then data, then pipeline, as megatron-core does."""

    rank: int
    tp: int
    pp: int
    dp: int
    tp_rank: int
    pp_rank: int
    dp_rank: int

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank answers for its data-parallel replica: it has the loss, and one is enough."""
        return self.last_stage and self.tp_rank == 0


def place_of(world: World, rank: int) -> Place:
    """Coordinates of `rank`."""
    return Place(
        rank=rank,
        tp=world.tp,
        pp=world.pp,
        dp=world.dp,
        tp_rank=rank % world.tp,
        dp_rank=rank // world.tp % world.dp,
        pp_rank=rank // (world.tp * world.dp),
    )


def own_address(nnodes: int) -> str:
    """An address of this machine that the run's other processes can reach."""
    return "127.0.0.1" if nnodes == 1 else socket.gethostbyname(socket.gethostname())


def join(device: Device, store: dist.Store, place: Place, timeout_s: float) -> None:
    """Make the default process group over `store` and megatron's groups inside it."""
    timeout = timedelta(seconds=timeout_s)
    world_size = place.tp * place.pp * place.dp
    dist.init_process_group(
        device.backend, store=store, rank=place.rank, world_size=world_size, timeout=timeout
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=place.tp,
        pipeline_model_parallel_size=place.pp,
        distributed_timeout_minutes=max(1, round(timeout_s / 60)),
        create_gloo_process_groups=False,
    )
    actual = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
    )
    assert actual == (place.tp_rank, place.pp_rank, place.dp_rank), (actual, place)


def leave() -> None:
    """Undo `join`."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def all_agree(device: Device, yes: bool) -> bool:
    """Whether every rank says yes; the same answer everywhere."""
    votes = torch.tensor([1.0 if yes else 0.0], device=device.torch_device)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def tensor_group(place: Place) -> dist.ProcessGroup | None:
    """The group that shares this rank's matrices; None where it is alone."""
    return parallel_state.get_tensor_model_parallel_group() if place.tp > 1 else None
