"""Two blocks of values compared bit by bit: how many elements differ, where first, and by how much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Tally:
    """The differences between two versions of a tensor, block after block.

    Values of different dtypes are compared after an exact widening to the least dtype that holds both. `rounds_equal`:
    the wider side, rounded to the other's dtype, is the other, bit for bit.
    """

    differing: int = 0
    first_index: tuple[int, ...] | None = None
    first_values: tuple[dict[str, Any], dict[str, Any]] | None = None
    max_abs_difference: float | None = None  # of finite elements
    not_finite: int = 0  # differing elements that are NaN or infinite on a side
    rounds_equal: bool = True

    def add(self, a: Tensor, b: Tensor, corner: tuple[int, ...]) -> None:
        """Compare two blocks of one shape whose first element has index `corner` in the tensor."""
        if a.dtype != b.dtype:
            self.rounds_equal = self.rounds_equal and _rounds_equal(a, b)
            wide = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(wide), b.to(wide)
        differ = bits(a) != bits(b)
        count = int(differ.sum())
        if not count:
            return
        if self.first_index is None:
            where = np.unravel_index(int(differ.numpy().argmax()), a.shape)  # numpy's is the first of equals
            self.first_index = tuple(int(i) + start for i, start in zip(where, corner, strict=True))
            self.first_values = (shown(a[where]), shown(b[where]))
        self.differing += count
        gap = (a[differ].double() - b[differ].double()).abs()
        finite = gap[gap.isfinite()]
        self.not_finite += count - finite.numel()
        if finite.numel():
            self.max_abs_difference = max(self.max_abs_difference or 0.0, float(finite.max()))


def bits(values: Tensor) -> Tensor:
    """The same bytes as whole numbers: NaNs compare by their bits, and 0.0 is not -0.0."""
    return values.view(_BITS[values.itemsize])


def shown(value: Tensor) -> dict[str, Any]:
    """A value for people, as text, and its bits in hexadecimal."""
    pattern = int(bits(value)) & ((1 << 8 * value.itemsize) - 1)
    return {"value": repr(float(value)), "bits": f"0x{pattern:0{2 * value.itemsize}x}"}


def _rounds_equal(a: Tensor, b: Tensor) -> bool:
    """Whether the wider of the two, rounded to the narrower's dtype, is the narrower."""
    if a.itemsize == b.itemsize:  # float16 and bfloat16: each has values that the other rounds
        return torch.equal(bits(a.to(b.dtype)), bits(b)) or torch.equal(bits(b.to(a.dtype)), bits(a))
    wide, narrow = (a, b) if a.itemsize > b.itemsize else (b, a)
    return torch.equal(bits(wide.to(narrow.dtype)), bits(narrow))
