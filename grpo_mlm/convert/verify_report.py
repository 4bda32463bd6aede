"""A verdict on two sets of weights as JSON, as text, and as the error that ends the command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grpo_mlm.convert.text import show_size
from grpo_mlm.convert.verify import Compared, Verdict
from grpo_mlm.errors import NamesDiffer, ValuesDiffer

SHOWN = 10
"""Names and differences that the text lists; JSON has them all."""


def as_json(verdict: Verdict, allow_rounding: bool) -> dict[str, Any]:
    """All of the verdict, in JSON values."""
    bad = mismatches(verdict, allow_rounding)
    return {
        "equal": verdict.same_names and not bad,
        "compared_tensors": len(verdict.compared),
        "bytes_read": verdict.bytes_read,
        "only_in_a": list(verdict.only_in_a),
        "only_in_b": list(verdict.only_in_b),
        "not_compared": list(verdict.not_compared),
        "allowed": list(verdict.allowed),
        "mismatches": [_entry(one) for one in bad],
        "rounded": [_entry(one) for one in _rounded(verdict, allow_rounding)],
        "other_dtype": [
            {"tensor": one.tensor, "dtype_a": one.dtype_a, "dtype_b": one.dtype_b}
            for one in verdict.other_dtype
        ],
    }


def mismatches(verdict: Verdict, allow_rounding: bool) -> list[Compared]:
    """The differences that count."""
    return [one for one in verdict.different if not (allow_rounding and one.only_rounded)]


def _rounded(verdict: Verdict, allow_rounding: bool) -> list[Compared]:
    """The differences that do not count."""
    return [one for one in verdict.different if allow_rounding and one.only_rounded]


def lines(verdict: Verdict, allow_rounding: bool) -> Iterator[str]:
    """The verdict for people."""
    for what, names in (
        ("only in A", verdict.only_in_a),
        ("only in B", verdict.only_in_b),
        ("unknown to config.json, or on neither side, and so not compared", verdict.not_compared),
        ("left out, as --allow-missing says", verdict.allowed),
    ):
        if names:
            yield f"{what}: {len(names)}"
            yield from _first([f"  {name}" for name in names])
    wrong = [one for one in verdict.different if not one.only_rounded]
    if wrong:
        yield f"different: {len(wrong)} of {len(verdict.compared)} tensors"
        yield from _first(
            [line for one in wrong[:SHOWN] for line in _describe(one)], len(wrong) - SHOWN, 4 * SHOWN
        )
    rounded = [one for one in verdict.different if one.only_rounded]
    for what, some in (("equal but for rounding", rounded), ("equal in value", verdict.other_dtype)):
        for dtypes in sorted({(one.dtype_a, one.dtype_b) for one in some}):
            count = sum((one.dtype_a, one.dtype_b) == dtypes for one in some)
            yield f"{what}: {count} tensors are {dtypes[0]} in A and {dtypes[1]} in B"
    same = sum(one.equal and one.dtype_a == one.dtype_b for one in verdict.compared)
    yield f"bit for bit equal: {same} of {len(verdict.compared)} tensors ({show_size(verdict.bytes_read)} read)"


def raise_unless_equal(verdict: Verdict, allow_rounding: bool) -> None:
    """NamesDiffer, or else ValuesDiffer, with the count; nothing where the weights are equal."""
    bad = mismatches(verdict, allow_rounding)
    also = f"; of the tensors that both have, {len(bad)} differ" if bad else ""
    if not verdict.same_names:
        counts = f"{len(verdict.only_in_a)} tensors only in A, {len(verdict.only_in_b)} only in B"
        raise NamesDiffer(f"names differ: {counts}, {len(verdict.not_compared)} not compared{also}")
    if bad:
        hint = ""
        if all(one.only_rounded for one in bad):
            hint = "; nothing but rounding to the narrower dtype differs: --allow-rounding accepts that"
        raise ValuesDiffer(f"{len(bad)} of {len(verdict.compared)} tensors differ{hint}")


def _entry(one: Compared) -> dict[str, Any]:
    tally = one.tally
    values = tally.first_values or (None, None)
    return {
        "tensor": one.tensor,
        "stored_a": list(one.stored_a),
        "stored_b": list(one.stored_b),
        "dtype_a": one.dtype_a,
        "dtype_b": one.dtype_b,
        "shape_a": list(one.shape),
        "shape_b": list(one.shape_b),
        "differing": tally.differing,
        "first_index": None if tally.first_index is None else list(tally.first_index),
        "first_a": values[0],
        "first_b": values[1],
        "max_abs_difference": tally.max_abs_difference,
        "not_finite": tally.not_finite,
        "only_rounded": one.only_rounded,
    }


def _describe(one: Compared) -> Iterator[str]:
    """A difference in a few lines."""
    yield f"  {one.tensor}"
    if (one.tensor,) != one.stored_a or (one.tensor,) != one.stored_b:
        yield f"    stored as {', '.join(one.stored_a)} in A, {', '.join(one.stored_b)} in B"
    if one.shape != one.shape_b:
        yield f"    shape {list(one.shape)} in A, {list(one.shape_b)} in B"
        return
    tally = one.tally
    assert tally.first_index is not None
    assert tally.first_values is not None
    a, b = tally.first_values
    elements = 1
    for n in one.shape:
        elements *= n
    largest = (
        "none is finite" if tally.max_abs_difference is None else f"at most {tally.max_abs_difference:.3g}"
    )
    yield (
        f"    {tally.differing} of {elements} elements, first at {list(tally.first_index)}: "
        f"{a['value']} ({a['bits']}) in A, {b['value']} ({b['bits']}) in B; differences {largest}"
    )


def _first(all_lines: Sequence[str], more: int | None = None, most: int = SHOWN) -> Iterator[str]:
    yield from all_lines[:most]
    more = len(all_lines) - most if more is None else more
    if more > 0:
        yield f"  and {more} more (--json lists all)"
