"""Nearest valid names."""

from __future__ import annotations

import pytest

from grpo_mlm.config.suggest import did_you_mean, nearest, nearest_path

PATHS = ["a.lr", "a.optim.lr", "a.optim.beta", "b.kl_coef", "b.size", "c.sizes"]


def test_nearest_name_or_none() -> None:
    assert nearest("exact_mach", ["exact_match", "math"]) == "exact_match"
    assert nearest("zzz", ["exact_match", "math"]) is None


def test_the_end_of_a_message() -> None:
    assert did_you_mean("maths", ["exact_match", "math"]) == "; did you mean math?"
    assert did_you_mean("zzz", ["math"]) == ""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a.optin.lr", "a.optim.lr"),  # the same last name: the most similar path of the two
        ("lr", "a.lr"),
        ("c.size", "b.size"),  # exactly this name elsewhere, rather than a similar one here
        ("c.sizs", "c.sizes"),  # a similar one here
        ("c.kl_coeff", "b.kl_coef"),  # a similar one anywhere
        ("c.qqqq", None),
    ],
)
def test_nearest_path(path: str, expected: str | None) -> None:
    assert nearest_path(path, PATHS) == expected
