"""Sends megatron-core's hard-coded `device="cuda"` to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, str | torch.device) else False


class RedirectCuda(TorchFunctionMode):
    """While active in a thread: tensors asked for on cuda are made on the CPU, `.cuda()` returns the tensor
    itself, and `.type()` answers with the `torch.cuda.*` spelling, the only one that the optimizers accept."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs) if kwargs else func(*args)
