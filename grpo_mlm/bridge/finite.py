"""Whether one rank's weights are numbers, before any of them goes to the engines."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from grpo_mlm.layouts.boxes import Layout, slices


@torch.no_grad()
def not_finite(layout: Layout, params: Mapping[str, Tensor]) -> list[str]:
    """Canonical names of the tensors with a NaN or an infinity in what this rank holds, each once.

    Padding does not count: it goes nowhere.
    """
    found: dict[str, None] = {}
    for local in _suspects({name: params[name] for name in layout.shapes if params[name].numel()}):
        matrix = params[local].view(layout.shapes[local])
        for piece in layout.pieces:
            if piece.local == local and not torch.isfinite(matrix[slices(piece.local_box)]).all():
                found[piece.tensor] = None
    return list(found)


def _suspects(params: Mapping[str, Tensor]) -> list[str]:
    """Local names; the extremes of a tensor are finite just if all of it is, and need no memory of its size."""
    extremes = [torch.stack(tensor.aminmax()).float() for tensor in params.values()]
    bounds = torch.stack(extremes).tolist() if extremes else []
    return [name for name, pair in zip(params, bounds, strict=True) if not all(map(math.isfinite, pair))]
