"""How far the sampler's log-probs are from the trainer's, on the same tokens and the same weights."""

from __future__ import annotations

import numpy as np


def rollout_mismatch(rollout_logprobs: np.ndarray, trainer_logprobs: np.ndarray) -> dict[str, float]:
    """Both `[R]`, of the sampled tokens; tokens that the trainer did not score (NaN) are left out.

    `rollout_probs_diff_*` are of |exp(trainer) - exp(rollout)|; `logprob_diff_max` of |trainer - rollout|;
    `kl` is the mean of rollout - trainer, the k1 estimate of KL(sampler || trainer).
    """
    scored = ~np.isnan(trainer_logprobs)
    if not scored.any():
        return {}
    rollout = rollout_logprobs[scored].astype(np.float64)
    trainer = trainer_logprobs[scored].astype(np.float64)
    probs_diff = np.abs(np.exp(trainer) - np.exp(rollout))
    return {
        "training/rollout_probs_diff_mean": float(probs_diff.mean()),
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_std": float(probs_diff.std()),
        "rollout_corr/kl": float((rollout - trainer).mean()),
        "rollout_corr/logprob_diff_max": float(np.abs(rollout - trainer).max()),
    }
