"""Metrics of parts put together, each with its own denominator."""

from __future__ import annotations

from grpo_mlm.telemetry.reduce import Part, merge, reduce_metrics

FIRST = {
    "loss": Part("sum", 1.5),
    "clipfrac": Part("mean", 1.0, 4),
    "kl": Part("mean", 0.0, 0),
    "ratio_max": Part("max", 1.2),
    "ratio_min": Part("min", 0.9),
}
SECOND = {
    "loss": Part("sum", -0.5),
    "clipfrac": Part("mean", 3.0, 6),
    "ratio_max": Part("max", 1.1),
    "ratio_min": Part("min", 0.4),
    "lr": Part("max", 1e-3),
}


def test_means_are_over_all_tokens_not_over_parts() -> None:
    assert reduce_metrics([FIRST, {}, SECOND]) == {
        "loss": 1.0,
        "clipfrac": 0.4,  # 4 of 10 tokens; the mean of the parts' means would be 0.375
        "ratio_max": 1.2,
        "ratio_min": 0.4,
        "lr": 1e-3,
    }


def test_merging_in_steps_is_merging_at_once() -> None:
    assert merge([merge([FIRST, SECOND]), FIRST]) == merge([FIRST, SECOND, FIRST])
