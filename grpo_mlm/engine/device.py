"""The device seam: what differs between a GPU and a CPU is decided here and nowhere else in the engine.

On a CPU, `install` teaches megatron-core that there is no GPU (see `cpu/`); everything after it is the same code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from grpo_mlm.errors import RunFailure

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class Device:
    """Where this process computes. `backend` carries its collectives."""

    kind: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl"]
    torch_device: torch.device

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run megatron code on this device. Entered for each call: both sides are settings of the thread."""
        if self.is_cpu:
            from grpo_mlm.engine.cpu.redirect import RedirectCuda

            with RedirectCuda():
                yield
        else:
            with torch.cuda.device(self.torch_device):
                yield

    def check(self, config: TransformerConfig) -> None:
        """Refuse combinations that megatron-core computes wrongly on this device without saying so."""
        if self.is_cpu:
            from grpo_mlm.engine.cpu.traps import check_traps

            check_traps(config)


def open_device(kind: Literal["auto", "cpu", "cuda"]) -> Device:
    """The device of this process, ready for megatron-core.

    `auto` is cuda where a GPU is visible. Every process sees its own GPU as number 0. RunFailure: cuda without one.
    """
    visible = torch.cuda.is_available()
    if kind == "cuda" and not visible:
        raise RunFailure("cluster.device=cuda, but this process sees no GPU (CUDA_VISIBLE_DEVICES?)")
    if kind == "cpu" or not visible:
        from grpo_mlm.engine.cpu.install import install

        install()
        return Device("cpu", "gloo", torch.device("cpu"))
    return Device("cuda", "nccl", torch.device("cuda", 0))
