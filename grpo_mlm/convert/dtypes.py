"""Which dtype each tensor of a conversion's output has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from grpo_mlm.convert.open import Weights
from grpo_mlm.convert.options import TORCH_DTYPES, Dtype
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.layouts.model import float32_tensors
from grpo_mlm.layouts.planner.copies import Copy


def target_dtypes(
    source: Weights, target: Layout, copies: Iterable[Copy], dtype: Dtype
) -> dict[str, torch.dtype]:
    """Dtype of each of the target's tensors: `dtype`, or with "keep" the one that its slices are stored in.

    What a family must have in fp32, such as a bias on the router's scores, is never cast. UserError where slices of
    one tensor are stored in several dtypes.
    """
    never_cast = float32_tensors(source.spec)
    found: dict[str, tuple[torch.dtype, str]] = {}
    for copy in copies:
        kept = dtype == "keep" or copy.tensor in never_cast
        wanted = source.store.dtype(copy.src_local) if kept else TORCH_DTYPES[dtype]
        known, of = found.setdefault(copy.dst_local, (wanted, copy.src_local))
        if known != wanted:
            raise UserError(
                f"{copy.dst_local} would hold {of} ({_name(known)}) and {copy.src_local} ({_name(wanted)}); "
                "choose one dtype for all with --dtype"
            )
    return {name: found[name][0] for name in target.shapes}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
