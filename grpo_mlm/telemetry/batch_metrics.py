"""What a finished batch says about itself: rewards, lengths, validity. Names as the field uses them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from grpo_mlm.data.batch import RolloutBatch


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    """`NAME/mean`, `/max`, `/min`; nothing where there are no values."""
    if len(values) == 0:
        return {}
    return {
        f"{name}/mean": float(values.mean()),
        f"{name}/max": float(values.max()),
        f"{name}/min": float(values.min()),
    }


def batch_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Rewards over valid samples only; lengths and stop reasons over all samples, untruncated by any mask."""
    valid = batch.valid
    metrics = spread("critic/rewards", batch.reward[valid])
    for name, values in batch.reward_parts.items():
        metrics |= spread(f"reward/{name}", values[valid & np.isfinite(values)])
    sources = np.array(batch.data_source)
    for source in sorted(set(batch.data_source)):
        rewards = batch.reward[valid & (sources == source)]
        if len(rewards):
            metrics[f"reward_by_source/{source}"] = float(rewards.mean())
    metrics |= spread("response_length", batch.response_lens)
    metrics["response_length/clip_ratio"] = float(
        np.mean([reason == "length" for reason in batch.finish_reason])
    )
    metrics |= spread("prompt_length", batch.prompt_lens)
    metrics["rollout/invalid_fraction"] = float(1 - valid.mean())
    for reason, count in Counter(r.split(":")[0] for r in batch.reason if r).items():
        metrics[f"reward/reason/{reason}"] = float(count)
    metrics["timing_s/gen_slowest_sample"] = float(batch.gen_seconds.max())
    metrics["timing_s/reward_slowest_sample"] = float(batch.reward_seconds.max())
    return metrics
