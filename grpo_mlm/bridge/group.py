"""The joint process group of all trainer ranks and all engine ranks, outside either side's own groups."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist


def open_store(host: str) -> dist.TCPStore:
    """A meeting point whose port the kernel picks and this process holds; others get (host, store.port)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def join(
    host: str,
    port: int,
    rank: int,
    world: int,
    device: torch.device,
    timeout_s: float,
    store: dist.Store | None = None,
) -> dist.ProcessGroup:
    """Gloo on CPUs, NCCL on GPUs. Every rank of the world calls it; the holder of the store passes it along.

    It never touches torch's default group, which trainer and vLLM each set up in their own way.
    """
    timeout = timedelta(seconds=timeout_s)
    store = store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store = dist.PrefixStore("bridge", store)
    if device.type == "cpu":
        return _as_group(dist.ProcessGroupGloo(store, rank, world, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _as_group(dist.ProcessGroupNCCL(store, rank, world, options))


def _as_group(backend: Any) -> dist.ProcessGroup:
    """A bare backend has the send and recv of a group, which is all that the bridge uses."""
    return cast(dist.ProcessGroup, backend)
