"""The process group in which weights travel, outside the groups that trainer and engines have of their own.

It joins all trainer ranks; where the engines have devices of their own, their ranks too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
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
        # Gloo cuts its connections when nobody holds the backend or any of its transfers: they are held here alone.
        self._flying: dict[int, dist.Work] = {}
        self._numbers = itertools.count()

    def send(self, tensor: Tensor, dst: int) -> Flight:
        """Start to send a contiguous tensor to rank `dst`; it stays untouched until the flight has ended."""
        return self._start("send", tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Flight:
        """Start to fill a contiguous tensor from rank `src`."""
        return self._start("recv", tensor, src)

    def close(self) -> None:
        """Cut the connections: a peer that waits for this rank fails at once instead of timing out."""
        self._flying.clear()
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.abort()

    def _start(self, what: str, tensor: Tensor, peer: int) -> Flight:
        if self._backend is None:
            raise PeerGone("the connection between trainer and engines was given up; both must join again")
        number = next(self._numbers)
        reason = ""
        try:
            self._flying[number] = getattr(self._backend, what)([tensor], peer, 0)
        except RuntimeError as error:
            reason = str(error)
        if reason:
            raise PeerGone(_broken_off(peer, reason))
        return Flight(self, number, peer)

    def _wait(self, number: int, peer: int) -> None:
        work = self._flying.pop(number, None)
        reason = "this rank has left" if work is None else ""
        try:
            if work is not None:
                work.wait()
        except RuntimeError as error:
            reason = str(error)
        work = None  # an exception keeps the variables of the functions that it leaves
        if reason:
            raise PeerGone(_broken_off(peer, reason))


@dataclass(frozen=True)
class Flight:
    """A tensor on its way."""

    group: JointGroup
    number: int
    peer: int

    def wait(self) -> None:
        """Return when it has arrived; PeerGone when it never will."""
        self.group._wait(self.number, self.peer)


def _broken_off(peer: int, reason: str) -> str:
    first = reason.strip().splitlines()[0]
    return f"the transfer with rank {peer} of the joint group broke off: {first}"


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
