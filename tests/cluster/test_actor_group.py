"""How the trainer's group cuts a step: any cut, and leaving out what has no gradient, changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch.nn.functional import one_hot

from grpo_mlm.algorithms.aggregate import token_weights
from grpo_mlm.algorithms.covariance import select_tokens
from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.config.schema import ActorConfig, RolloutCorrectionConfig
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import pack_samples
from grpo_mlm.engine.head import Head
from grpo_mlm.engine.loss import StepLoss
from grpo_mlm.telemetry.reduce import merge
from tests.data.samples import batch_of

VOCAB = 11


class Replicas(ActorGroup):
    """`dp` replicas of a bigram table in this process; gradients add up in `table.grad`."""

    def __init__(self, dp: int, config: ActorConfig) -> None:
        super().__init__([], dp, config, 1.0)
        rows = torch.linspace(-2, 2, VOCAB * VOCAB, dtype=torch.float64).sin().reshape(VOCAB, VOCAB)
        self.table = (3 * rows).float().requires_grad_()  # [token, next token]
        self.scheduled: list[int] = []

    def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "update"
        batch, schedule, weights, selected = args
        loss = StepLoss(self.config, RolloutCorrectionConfig(), batch, weights, selected, torch.device("cpu"))
        return [self._replica(batch, micros, loss) for micros in schedule]

    def _replica(self, batch: RolloutBatch, micros: list[list[int]], loss: StepLoss) -> dict[str, Any]:
        logprobs, metrics = [], []
        # A hidden state is one-hot, so the table is the output matrix.
        layer = SimpleNamespace(weight=self.table.T)
        model: Any = SimpleNamespace(share_embeddings_and_output_weights=False, output_layer=layer)
        head = Head(model, 1.0, VOCAB, 1 << 20, "chunked", None)
        for micro in micros:
            pack = pack_samples(batch, np.array(micro, dtype=np.int64))
            hidden = one_hot(pack.tokens, VOCAB).float()[None].requires_grad_()
            value, report = loss(head, hidden, pack)
            value.backward()
            logprobs.append(report.logprobs)
            metrics.append(report.metrics)
            self.scheduled += micro
        indices = [i for micro in micros for i in micro]
        return {"metrics": merge(metrics), "indices": indices, "logprobs": torch.cat(logprobs).numpy()}


def step_batch() -> RolloutBatch:
    """Six groups of four samples; every other group has advantage 0; some responses are empty."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 7, 24)
    batch = batch_of(
        [(rng.integers(0, VOCAB, 3).tolist(), rng.integers(0, VOCAB, n).tolist()) for n in lengths],
        group_id=[i // 4 for i in range(24)],
    )
    values = rng.normal(size=24) * (batch.group_id % 2)
    batch.advantages = np.repeat(values, lengths).astype(np.float32)
    batch.old_logprobs = (-rng.random(lengths.sum()) * 4).astype(np.float32)
    batch.ref_logprobs = (-rng.random(lengths.sum()) * 4).astype(np.float32)
    return batch


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"use_kl_loss": True, "kl_loss_coef": 0.1},
        {"entropy_coeff": 0.01},
        {"policy_loss": {"loss_mode": "gspo"}},
        {"policy_loss": {"loss_mode": "kl_cov"}},
    ],
    ids=["plain", "kl", "entropy", "gspo", "kl_cov"],
)
def test_cuts_and_skipped_samples_change_neither_gradient_nor_loss(
    mode: str, terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AGG-01, AGG-03, AGG-06. Against one replica that computes every trained sample at once."""
    monkeypatch.setattr(ray, "put", lambda value: value)
    batch, config = step_batch(), ActorConfig(loss_agg_mode=mode, **terms)  # type: ignore[arg-type]
    trained = np.arange(24) % 5 != 0
    whole = Replicas(1, config)
    weights = token_weights(batch.response_lens, trained, config.loss_agg_mode).astype(np.float32)
    selected = None
    if config.policy_loss.loss_mode == "kl_cov":
        rng = np.random.default_rng(0)
        selected = select_tokens(batch.old_logprobs, batch.advantages, weights > 0, config.policy_loss, rng)
    pack = [list(range(24))]
    loss = whole.call("update", batch, [pack], weights, selected)[0]["metrics"]["actor/loss"].value
    assert whole.table.grad is not None
    for dp, budget in ((1, 10_000), (1, 12), (2, 16), (3, 30)):
        group = Replicas(dp, config.model_copy(update={"max_tokens_per_gpu": budget}))
        metrics, logprobs = group.update(batch, np.arange(24), trained, np.random.default_rng(0))
        torch.testing.assert_close(group.table.grad, whole.table.grad, rtol=1e-5, atol=1e-8)
        assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
        every = "use_kl_loss" in terms or "entropy_coeff" in terms or selected is not None
        computed = trained if every else trained & (batch.group_id % 2 == 1) & (batch.response_lens > 0)
        assert sorted(group.scheduled) == np.flatnonzero(computed).tolist()
        assert np.array_equal(~np.isnan(logprobs), np.repeat(computed, batch.response_lens))
