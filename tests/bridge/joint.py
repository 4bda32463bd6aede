"""Ranks of a joint group as threads of this process, and their weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from grpo_mlm.bridge.group import JointGroup, join, open_store
from grpo_mlm.layouts.boxes import Layout, slices

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
TIMEOUT_S = 60.0  # of a meeting or a transfer; reached only by a test that fails


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread of its own; results in order, an exception in place of the result it prevented."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def meet(world: int, timeout_s: float = TIMEOUT_S) -> list[JointGroup]:
    """A joint group of `world` ranks, all of them here."""
    store = open_store("127.0.0.1")
    device = torch.device("cpu")
    return at_once(
        [lambda r=r: join("127.0.0.1", store.port, r, world, device, timeout_s) for r in range(world)]
    )


def fill(layout: Layout, canonical: dict[str, Tensor]) -> dict[str, Tensor]:
    """The local tensors that a layout describes, by its own definition; padding is zero."""
    local = {name: torch.zeros(shape) for name, shape in layout.shapes.items()}
    for piece in layout.pieces:
        local[piece.local][slices(piece.local_box)] = canonical[piece.tensor][slices(piece.box)]
    return local
