"""Once a process: make megatron-core importable and runnable without CUDA."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer

from grpo_mlm.engine.cpu.adam import CpuFusedAdam


class _Event:
    """An event of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Event):
    """The one stream that there is."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


_STREAM = _Stream()

# Names that megatron-core calls without asking whether there is a GPU.
_CUDA_NAMES: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": lambda *args: None,
    "Event": _Event,
    "Stream": _Stream,
    "current_stream": lambda *args: _STREAM,
    "default_stream": lambda *args: _STREAM,
    "stream": lambda *args: nullcontext(),
}


def install() -> None:
    """Patch `torch.cuda` names, switch torch.compile off, give megatron a fused Adam. Safe to call again.

    The redirection of `device="cuda"` is not here: it belongs to a thread, see `Device.active`.
    """
    if torch.cuda.current_device is _CUDA_NAMES["current_device"]:
        return
    # megatron decorates its element-wise functions with torch.compile at import: minutes of compiling for nothing.
    torch.compiler.set_stance("force_eager")
    for name, value in _CUDA_NAMES.items():
        setattr(torch.cuda, name, value)
    _install_adam()


def _install_adam() -> None:
    optimizer.Adam = distrib_optimizer.Adam = CpuFusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
