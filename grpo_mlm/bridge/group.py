"""The process group in which weights travel, outside the groups that trainer and engines have of their own.

It joins all trainer ranks; where the engines have devices of their own, their ranks too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_mlm.errors import PeerGone


class JointGroup:
    """This rank's connections to all others: trainer ranks first, then the engines' in order.

    A bare backend, because torch's default group is set up by trainer and vLLM each in their own way. Point to
    point only. After `close` nothing can be sent: ranks that stopped in mid-transfer have to join anew.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def send(self, tensor: Tensor, dst: int) -> dist.Work:
        """Start to send a contiguous tensor to rank `dst`; it stays untouched until the work is done."""
        return self._open().send([tensor], dst, 0)

    def recv(self, tensor: Tensor, src: int) -> dist.Work:
        """Start to fill a contiguous tensor from rank `src`."""
        return self._open().recv([tensor], src, 0)

    def close(self) -> None:
        """Cut the connections: a peer that waits for this rank fails at once instead of timing out."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _open(self) -> Any:
        if self._backend is None:
            raise PeerGone("the connection between trainer and engines was given up; both must join again")
        return self._backend


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
) -> JointGroup:
    """Gloo on CPUs, NCCL on GPUs. Every rank of the world calls it; the holder of the store passes it along.

    A store serves one group. `timeout_s` bounds the meeting and each transfer.
    """
    timeout = timedelta(seconds=timeout_s)
    store = store or dist.TCPStore(host, port, is_master=False, timeout=timeout)
    store = dist.PrefixStore("bridge", store)
    if device.type == "cpu":
        return JointGroup(dist.ProcessGroupGloo(store, rank, world, timeout))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return JointGroup(dist.ProcessGroupNCCL(store, rank, world, options))
