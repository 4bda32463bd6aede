"""Weights on disk, whatever the format: stored tensors whose slices can be read without reading the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from grpo_mlm.layouts.boxes import Box, Layout


class TensorStore(Protocol):
    """One set of stored weights. Boxes are in the stored tensor's matrix form, as in its `layout`."""

    folder: Path

    @property
    def layout(self) -> Layout:
        """Stored names, and the canonical boxes that each holds."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Of one stored tensor."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """That part of a stored tensor, contiguous, in its own dtype, in host memory. Safe in threads.

        No more than the asked part is held in memory. UserError where the file is damaged, naming it.
        """
        ...

    def files(self) -> list[Path]:
        """The files with the weights, in order."""
        ...
