"""Validation: every row counts once, with its own sampling settings and the training rewards."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from grpo_mlm.rollout.request import Sampling
from grpo_mlm.trainer.rollout import make_requests, rollout

if TYPE_CHECKING:
    from grpo_mlm.trainer.run import Run


def validate(run: Run) -> dict[str, float]:
    """`val-core/SOURCE/reward/mean@N` over the rows of each source; invalid samples are left out and counted.

    The seeds depend on the run's seed and the row alone, so every validation draws alike.
    """
    assert run.engines is not None
    config = run.config
    val = config.rollout.val_kwargs
    prompts = dict(enumerate(run.val_prompts))
    sampling = Sampling(
        val.temperature, config.data.max_response_length, val.top_p, val.top_k, tuple(config.rollout.stop)
    )
    requests = make_requests(prompts, val.n, config.run.seed, step=-1)
    with run.console.generating(len(requests)) as advance:
        finished, _ = rollout(
            run.engines,
            run.scorer,
            prompts,
            requests,
            sampling,
            advance,
            config.cluster.call_timeout_s,
        )
    values: dict[str, list[float]] = defaultdict(list)
    for sample in finished:
        if not sample.result.invalid:
            values[sample.prompt.data_source].append(sample.result.value)
    metrics = {
        f"val-core/{source}/reward/mean@{val.n}": math.fsum(v) / len(v) for source, v in values.items()
    }
    metrics["val-aux/rows"] = float(len(prompts))
    metrics["val-aux/invalid_fraction"] = 1 - sum(map(len, values.values())) / len(finished)
    metrics["val-aux/response_length/mean"] = sum(len(s.completion.token_ids) for s in finished) / len(
        finished
    )
    return metrics
