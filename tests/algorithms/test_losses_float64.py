"""Every policy loss with every KL, aggregation and importance weights, against formulas in float64, token by token.

Batches are ragged and random: groups of 2 to 64 samples, responses of one token, samples that are masked whole,
log-probs up to 200 apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.algorithms.grpo_loss import POLICY_LOSSES, loss_metrics, token_losses
from grpo_mlm.algorithms.kl import KL_ESTIMATORS
from grpo_mlm.algorithms.loss_tokens import LossTokens
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig

LOW, HIGH, C = 0.2, 0.28, 3.0
BETA, ENTROPY = 0.05, 0.01


@dataclass(frozen=True)
class Batch:
    lens: np.ndarray
    trained: np.ndarray  # [N]
    columns: dict[str, np.ndarray]  # [R] float64
    selected: np.ndarray

    @property
    def sample(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.lens)), self.lens)


def random_batch(seed: int, apart: float) -> Batch:
    rng = np.random.default_rng(seed)
    n = int(rng.choice([2, 3, 8, 64]))
    lens = rng.integers(1, 9, n)
    lens[rng.integers(n)] = 1
    total = int(lens.sum())
    new = -rng.exponential(1.0, total)
    columns = {
        "new": new,
        "old": np.minimum(new + rng.normal(0, apart, total), -1e-3),
        "ref": np.minimum(new + rng.normal(0, apart, total), -1e-3),
        "rollout": np.minimum(new + rng.normal(0, apart / 4, total), -1e-3),
        "entropy": rng.random(total) * 5,
        "advantages": np.repeat(rng.normal(size=n).round(1), lens),
    }
    return Batch(
        lens,
        rng.random(n) > 0.2,
        {k: v.astype(np.float32).astype(np.float64) for k, v in columns.items()},
        rng.random(total) < 0.3,
    )


def bounded(x: Tensor) -> Tensor:
    return x.clamp(-20, 20)


def vanilla(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    r = bounded(new[t] - old[t]).exp()
    loss = torch.maximum(-r * a, -r.clamp(1 - LOW, 1 + HIGH) * a)
    return torch.minimum(loss, torch.tensor(-C * a, dtype=torch.float64)) if a < 0 else loss


def cispo(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    r = min(max(math.exp(bounded(new[t] - old[t]).item()), 1 - LOW), 1 + HIGH)
    return -r * a * new[t]


def sapo(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + torch.exp(-tau * (bounded(new[t] - old[t]).exp() - 1)))


def dppo(kind: str) -> Callable[..., Tensor]:
    def loss(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
        p, q = math.exp(new[t].item()), math.exp(old[t].item())
        moved = (p - q) if a > 0 else (q - p)
        size = moved
        if kind == "kl":
            other = max(1 - p, 2.0**-24)
            size = q * (old[t].item() - new[t].item()) + (1 - q) * (math.log(1 - q) - math.log(other))
        if moved > 0 and size > (HIGH if a > 0 else LOW):
            return 0.0 * new[t]
        return -min(math.exp(bounded(new[t] - old[t]).item()), C) * a * new[t]

    return loss


def clip_cov(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    loss = vanilla(new, old, a, t, batch)
    return loss.detach() + 0.0 * new[t] if batch.selected[t] else loss


def kl_cov(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    loss = -bounded(new[t] - old[t]).exp() * a
    return loss + (new[t] - old[t]).abs() if batch.selected[t] else loss


def gspo(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    """The form over sequences: its gradient is spread over the tokens, so only their sum over a sample is the same."""
    mine = torch.from_numpy(batch.sample == batch.sample[t])
    s = bounded((new - old)[mine].mean()).exp()
    return torch.maximum(-s * a, -s.clamp(1 - LOW, 1 + HIGH) * a)


def geo_mean(new: Tensor, old: Tensor, a: float, t: int, batch: Batch) -> Tensor:
    mine = torch.from_numpy(batch.sample == batch.sample[t])
    d = bounded(new - old)[mine]
    d = d.clamp(max=HIGH) if a > 0 else d.clamp(min=-LOW)
    return -a * d.mean().exp()


EXPECTED: dict[str, Callable[..., Tensor]] = {
    "vanilla": vanilla, "cispo": cispo, "sapo": sapo, "dppo_tv": dppo("tv"), "dppo_kl": dppo("kl"),
    "clip_cov": clip_cov, "kl_cov": kl_cov, "gspo": gspo, "geo_mean": geo_mean,
}  # fmt: skip


def kl(kind: str, d: Tensor) -> Tensor:
    """Value and gradient of one token's estimate."""
    value = {
        "k1": d, "kl": d, "abs": d.abs(), "k2": d**2 / 2, "mse": d**2 / 2,
        "k3": (-bounded(d)).exp() + bounded(d) - 1, "low_var_kl": (-bounded(d)).exp() + bounded(d) - 1,
    }[kind.removesuffix("+")]  # fmt: skip
    return value.detach() + d.detach() * (d - d.detach()) if kind.endswith("+") else value


def expected(batch: Batch, weights: np.ndarray, mode: str, kind: str, is_weights: np.ndarray) -> Any:
    """Loss, gradients by log-prob and by entropy, in float64."""
    new = torch.from_numpy(batch.columns["new"]).requires_grad_()
    entropy = torch.from_numpy(batch.columns["entropy"]).requires_grad_()
    old, ref = (torch.from_numpy(batch.columns[name]) for name in ("old", "ref"))
    loss = 0.0 * (new.sum() + entropy.sum())
    for t in np.flatnonzero(weights):
        policy = EXPECTED[mode](new, old, float(batch.columns["advantages"][t]), t, batch)
        loss = loss + weights[t] * (
            is_weights[t] * policy + BETA * kl(kind, new[t] - ref[t]) - ENTROPY * entropy[t]
        )
    loss.backward()
    assert new.grad is not None
    assert entropy.grad is not None
    return loss.item(), new.grad.numpy(), entropy.grad.numpy()


def ours(batch: Batch, weights: np.ndarray, mode: str, kind: str, is_weights: np.ndarray) -> Any:
    """The same from float32 tensors, masked tokens left out as the engine leaves them out."""
    at = np.flatnonzero(weights)

    def column(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values[at].astype(np.float32))

    new, entropy = (column(batch.columns[name]).requires_grad_() for name in ("new", "entropy"))
    tokens = LossTokens(
        advantages=column(batch.columns["advantages"]),
        weights=column(weights),
        sample=torch.from_numpy(batch.sample[at]),
        old_logprobs=column(batch.columns["old"]),
        ref_logprobs=column(batch.columns["ref"]),
        is_weights=column(is_weights),
        selected=torch.from_numpy(batch.selected[at]),
    )
    actor = ActorConfig.model_validate(
        {
            "policy_loss": {"loss_mode": mode}, "clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": C,
            "use_kl_loss": True, "kl_loss_coef": BETA, "kl_loss_type": kind, "entropy_coeff": ENTROPY,
        }
    )  # fmt: skip
    values, report = token_losses(new, entropy, tokens, actor, RolloutCorrectionConfig())
    loss = values.sum()
    loss.backward()
    gradients = []
    for leaf in (new, entropy):
        every = np.zeros(len(weights))
        every[at] = leaf.grad.numpy() if leaf.grad is not None else 0.0
        gradients.append(every)
    metrics = loss_metrics(report)
    assert all(math.isfinite(part.value) for part in metrics.values())
    return loss.item(), *gradients


def assert_equal(batch: Batch, mode: str, got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        scale = max(np.abs(b).max(), 1e-6)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("apart", [0.3, 200.0])
@pytest.mark.parametrize(
    "agg", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("mode", list(EXPECTED))
def test_losses_equal_their_formulas(mode: str, agg: Any, apart: float) -> None:
    assert set(EXPECTED) == set(POLICY_LOSSES)
    kinds = [k + plus for k in KL_ESTIMATORS for plus in ("", "+")]
    for seed in range(4):
        batch = random_batch(seed, apart)
        weights = token_weights(batch.lens, batch.trained, agg, 16.0 if agg.endswith("norm") else None)
        is_weights = np.random.default_rng(seed).random(len(weights)).astype(np.float32) * 2
        kind = kinds[(seed + 4 * list(EXPECTED).index(mode)) % len(kinds)]
        want = expected(batch, weights, mode, kind, is_weights.astype(np.float64))
        got = ours(batch, weights, mode, kind, is_weights)
        if mode == "gspo":  # with weights that differ inside a sample, gradients are those of its token form
            got, want = got[:1], want[:1]
        assert_equal(batch, mode, got, want)


@pytest.mark.parametrize("kind", [k + plus for k in KL_ESTIMATORS for plus in ("", "+")])
@pytest.mark.parametrize("apart", [0.3, 200.0])
def test_every_kl_in_the_loss(kind: str, apart: float) -> None:
    batch = random_batch(11, apart)
    weights = token_weights(batch.lens, batch.trained, "token-mean")
    ones = np.ones(len(weights), dtype=np.float32)
    assert_equal(
        batch,
        "vanilla",
        ours(batch, weights, "vanilla", kind, ones),
        expected(batch, weights, "vanilla", kind, ones),
    )


@pytest.mark.parametrize("seed", range(4))
def test_gspo_is_its_sequence_form_for_equal_weights_inside_a_sample(seed: int) -> None:
    """Equations 5 and 13 of the paper have the same gradient by each token's log-prob."""
    batch = random_batch(seed, 0.3)
    weights = token_weights(batch.lens, batch.trained, "seq-mean-token-mean")
    ones = np.ones(len(weights), dtype=np.float32)
    assert_equal(
        batch, "gspo", ours(batch, weights, "gspo", "k3", ones), expected(batch, weights, "gspo", "k3", ones)
    )
