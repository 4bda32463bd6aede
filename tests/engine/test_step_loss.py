"""The loss of a micro-batch of an optimizer step: its terms, its masks, its metrics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig
from grpo_mlm.data.microbatch import pack_samples
from grpo_mlm.engine.loss import StepLoss
from grpo_mlm.telemetry.reduce import Part, reduce_metrics
from tests.data.samples import batch_of

INF, NAN = float("inf"), float("nan")


class GivenHead:
    """Log-probs and entropies that are given instead of made: `hidden` is `[1, R, 2]` of them."""

    def logprobs(self, hidden: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return hidden[0, rows, 0], hidden[0, rows, 1]

    def loss(
        self, hidden: Tensor, rows: Tensor, targets: Tensor, loss_fn: Any, entropy_grad: bool
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        logprobs, entropy = self.logprobs(hidden, rows, targets)
        values, report = loss_fn(
            logprobs, entropy if entropy_grad else entropy.detach(), torch.arange(len(rows))
        )
        return values.sum(), logprobs.detach(), report


def run(
    logprobs: list[float],
    old: list[float] | None = None,
    ref: list[float] | None = None,
    advantages: list[float] | None = None,
    weights: list[float] | None = None,
    entropy: list[float] | None = None,
    **config: Any,
) -> tuple[float, list[float], list[float], dict[str, Part]]:
    """Loss, its gradient by log-probs and by entropies, metrics; of one sample's response."""
    n = len(logprobs)

    def column(values: list[float] | None, default: float | None = None) -> Any:
        if values is None:
            return None if default is None else np.full(n, default, dtype=np.float32)
        return np.float32(values)

    batch = replace(
        batch_of([([1], [2] * n)], group_id=[0]),
        old_logprobs=column(old),
        ref_logprobs=column(ref),
        advantages=column(advantages, 0.0),
    )
    hidden = torch.tensor([logprobs, entropy or [0.0] * n], dtype=torch.float32).T[None].requires_grad_()
    weight = column(weights, 1 / n)
    step = StepLoss(
        ActorConfig(**config), RolloutCorrectionConfig(), batch, weight, None, torch.device("cpu")
    )
    head: Any = GivenHead()
    pack = replace(pack_samples(batch, np.array([0])), rows=torch.arange(n))
    loss, found = step(head, hidden, pack)
    loss.backward()
    assert hidden.grad is not None
    assert np.array_equal(found.logprobs.isnan().numpy(), (weight == 0) | np.isnan(np.float32(logprobs)))
    gradient = hidden.grad[0].T.tolist()
    return loss.item(), gradient[0], gradient[1], found.metrics


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_is_the_policys() -> None:
    loss, gradient, _, metrics = run([-1.0, -3.0], advantages=[2.0, -1.0])
    assert loss == pytest.approx(-0.5)
    assert gradient == pytest.approx([-1.0, 0.5])
    assert (metrics["actor/ratio_max"].value, metrics["actor/ratio_min"].value) == (1.0, 1.0)
    assert metrics["actor/ppo_kl"] == Part("mean", 0.0, 2.0)


def test_the_kl_term_pulls_towards_the_reference() -> None:
    """KL-01. All advantages 0, coefficient 0.1, k3."""
    on = {"use_kl_loss": True, "kl_loss_coef": 0.1}
    loss, gradient, _, metrics = run([-1.0], ref=[-1.5], **on)
    assert loss == pytest.approx(0.0106531, abs=1e-7)
    assert gradient == pytest.approx([0.039347], abs=1e-6)
    assert (metrics["actor/kl"].value, metrics["actor/kl"].count) == (pytest.approx(0.106531, abs=1e-6), 1)
    assert run([-1.5], ref=[-1.0], **on)[1] == pytest.approx([-0.0648721], abs=1e-6)


def test_the_kl_switch_is_read_not_only_the_coefficient() -> None:
    loss, gradient, _, metrics = run([-1.0], ref=[-1.5], use_kl_loss=False, kl_loss_coef=0.1)
    assert (loss, gradient) == (0.0, [0.0])
    assert "actor/kl" not in metrics


def test_kl_leaves_masked_tokens_out_of_loss_and_metric() -> None:
    """KL-03. k1+ of .1 and .3, and 5 in a masked cell: 0.2, not 1.8."""
    logp, ref = [-1.0, -1.0, -1.0], [-1.1, -1.3, -6.0]
    loss, _, _, metrics = run(
        logp, ref=ref, weights=[0.5, 0.5, 0.0], use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k1+"
    )
    assert loss == pytest.approx(0.2)
    assert reduce_metrics([metrics])["actor/kl"] == pytest.approx(0.2)


def test_the_kl_term_changes_neither_policy_loss_nor_clip_metrics() -> None:
    """KL-07. Old and reference log-probs differ, so a mix-up would show."""
    batch: dict[str, Any] = {
        "logprobs": [-1.0, -0.5, -2.0, -1.0],
        "old": [-1.5, -1.0, -0.5, -1.0],
        "ref": [-3.0, -0.1, -2.5, -1.0],
        "advantages": [1.0, -1.0, -1.0, 0.5],
    }
    *_, off = run(**batch)
    *_, on = run(**batch, use_kl_loss=True, kl_loss_coef=0.1)
    for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio_max", "ratio_min"):
        assert on[f"actor/{name}"] == off[f"actor/{name}"], name
    assert on["actor/loss"].value > off["actor/loss"].value


def test_the_entropy_bonus_raises_entropy_and_costs_nothing_when_off() -> None:
    loss, _, gradient, metrics = run([-1.0, -1.0], entropy=[2.0, 1.0], entropy_coeff=0.1)
    assert loss == pytest.approx(-0.15)
    assert gradient == pytest.approx([-0.05, -0.05])
    assert metrics["actor/entropy"] == Part("mean", 3.0, 2.0)
    _, _, gradient, metrics = run([-1.0, -1.0], entropy=[2.0, 1.0])
    assert gradient == [0.0, 0.0]
    assert metrics["actor/entropy"] == Part("mean", 3.0, 2.0)


def test_the_clip_fraction_counts_tokens() -> None:
    """MET-01. Ratios 1.5, 1.5, 1.5, 1.0 with advantages +, +, -, +: 0.5 of them."""
    logp = torch.tensor([1.5, 1.5, 1.5, 1.0]).log().tolist()
    *_, metrics = run(logp, old=[0.0] * 4, advantages=[1.0, 1.0, -1.0, 1.0])
    assert metrics["actor/pg_clipfrac"] == Part("mean", 2.0, 4.0)
    *_, metrics = run([2.0, 2.0], old=[0.0, 0.0], advantages=[-1.0, 1.0])
    assert metrics["actor/pg_clipfrac_lower"] == Part("mean", 1.0, 2.0)


def test_metrics_of_the_pieces_add_up_to_those_of_the_whole() -> None:
    """MET-01 over micro-batches and ranks: 1 of 3 and 1 of 1 tokens clipped are 2 of 4, not the mean 2/3."""
    logp = torch.tensor([1.5, 1.0, 1.0, 1.5]).log().tolist()
    batch: dict[str, Any] = {"old": [0.0] * 4, "advantages": [1.0, 1.0, 2.0, 3.0], "weights": [0.25] * 4}
    *_, whole = run(logp, **batch)
    *_, first = run(logp[:3], **{name: values[:3] for name, values in batch.items()})
    *_, second = run(logp[3:], **{name: values[3:] for name, values in batch.items()})
    joined = reduce_metrics([first, second])
    assert joined == pytest.approx(reduce_metrics([whole]), rel=1e-12)
    assert joined["actor/pg_clipfrac"] == pytest.approx(0.5)


def test_masked_tokens_cannot_reach_a_gradient() -> None:
    """NUM-01. A ratio of exp(200) in a masked cell."""
    loss, gradient, _, _ = run(
        [0.0, 0.0, 0.0], [0.0, 0.0, -200.0], advantages=[1.0] * 3, weights=[0.5, 0.5, 0.0]
    )
    assert loss == pytest.approx(-1.0)
    assert gradient == [-0.5, -0.5, 0.0]


@pytest.mark.parametrize("column", ["logprobs", "old", "ref", "advantages", "entropy"])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_no_value_in_a_masked_cell_matters(column: str, poison: float) -> None:
    """NUM-01, second part."""
    batch = {name: [-0.5, -1.0, -1.5] for name in ("logprobs", "old", "ref", "advantages", "entropy")}
    settings: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    clean = run(**batch, weights=[0.5, 0.5, 0.0], **settings)
    batch[column] = [-0.5, -1.0, poison]
    assert run(**batch, weights=[0.5, 0.5, 0.0], **settings) == clean


def test_a_micro_batch_without_trained_tokens_gives_zero() -> None:
    """NUM-02. Loss 0, gradient 0, denominators 0."""
    loss, gradient, _, metrics = run([-1.0, -2.0], [NAN, -INF], advantages=[1.0, 1.0], weights=[0.0, 0.0])
    assert (loss, gradient) == (0.0, [0.0, 0.0])
    assert {(part.value, part.count) for part in metrics.values()} <= {(0.0, 0.0)}
