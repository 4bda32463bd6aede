"""Two buckets of memory that a trainer rank and the engine rank on its device both see.

On a CPU: anonymous memory, whose file descriptor goes over the socket. On a GPU: device memory, whose CUDA IPC
handles do. Either ends with the last process that holds it; nothing has a name in the file system.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import Any

import torch
from torch import Tensor

SLOTS = 2  # one is filled while the other is emptied
Invitation = tuple[bytes, list[int]]
"""What the other process needs to see the same memory: a message and file descriptors."""


def make_slots(nbytes: int, device: torch.device) -> tuple[list[Tensor], Invitation]:
    """New slots, uint8 `[nbytes]` each. The file descriptors are the caller's to close, once they are sent."""
    if device.type == "cpu":
        fd = os.memfd_create("grpo_mlm slots")
        os.ftruncate(fd, SLOTS * nbytes)
        return _map(fd, nbytes), (json.dumps({"nbytes": nbytes}).encode(), [fd])
    # Allocated on their own, so that the handle opens no memory of anyone else's.
    slots = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
    handles = [[_as_text(part) for part in slot.untyped_storage()._share_cuda_()] for slot in slots]
    return slots, (json.dumps({"nbytes": nbytes, "handles": handles}).encode(), [])


def open_slots(message: bytes, fds: list[int], device: torch.device) -> list[Tensor]:
    """The same slots in the other process; the file descriptors are closed."""
    content = json.loads(message)
    if "handles" not in content:
        [fd] = fds
        slots = _map(fd, content["nbytes"])
        os.close(fd)
        return slots
    return [_open_cuda(handle, content["nbytes"], device) for handle in content["handles"]]


def _map(fd: int, nbytes: int) -> list[Tensor]:
    memory = mmap.mmap(fd, SLOTS * nbytes)  # lives as long as a tensor of it
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return [whole[i * nbytes : (i + 1) * nbytes] for i in range(SLOTS)]


def _open_cuda(handle: list[Any], nbytes: int, device: torch.device) -> Tensor:
    _, *rest = (bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle)
    # The sender's number of the device means nothing here: each process numbers those that it sees.
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *rest)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def _as_text(part: Any) -> Any:
    return {"hex": part.hex()} if isinstance(part, bytes) else part
