"""The reference policy: a second set of weights for the same module, kept on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


@torch.no_grad()
def host_copy(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are now, in host memory."""
    return {name: param.detach().to("cpu", copy=True) for name, param in params.items()}


@contextmanager
def swapped_in(params: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Compute with `weights` inside the block; the live parameters are back after it, whatever happens."""
    live = {name: param.data for name, param in params.items()}
    try:
        for name, param in params.items():
            param.data = weights[name].to(param.device)
        yield
    finally:
        for name, param in params.items():
            param.data = live[name]
