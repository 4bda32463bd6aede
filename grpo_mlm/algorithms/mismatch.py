"""How far the sampler's log-probs are from the trainer's, on the same tokens and the same weights."""

from __future__ import annotations

import numpy as np

LOG_RATIO_BOUND = 20.0


def rollout_mismatch(
    rollout_logprobs: np.ndarray, trainer_logprobs: np.ndarray, response_lens: np.ndarray
) -> dict[str, float]:
    """Both `[R]`, of the sampled tokens; tokens that the trainer did not score (NaN) are left out; `response_lens`
    `[N]`.

    With d = trainer - rollout, of each token: `rollout_probs_diff_*` are of |exp(trainer) - exp(rollout)|,
    `logprob_diff_max` of |d|; `kl` is the mean of -d, the k1 estimate of KL(sampler || trainer), and `k3_kl` that of
    exp(d) - 1 - d; `ess` is (sum w)^2 / (N sum w^2) of the weights w = exp(d), 1 where both agree. `ppl_ratio` is the
    mean over samples of exp(-mean d): how much more the sample surprises the trainer.
    """
    scored = ~np.isnan(trainer_logprobs)
    if not scored.any():
        return {}
    rollout = rollout_logprobs[scored].astype(np.float64)
    trainer = trainer_logprobs[scored].astype(np.float64)
    probs_diff = np.abs(np.exp(trainer) - np.exp(rollout))
    d = np.clip(trainer - rollout, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weights = np.exp(d)
    sample = np.repeat(np.arange(len(response_lens)), response_lens)[scored]
    counts = np.bincount(sample)
    means = np.bincount(sample, weights=d)[counts > 0] / counts[counts > 0]
    return {
        "training/rollout_probs_diff_mean": float(probs_diff.mean()),
        "training/rollout_probs_diff_max": float(probs_diff.max()),
        "training/rollout_probs_diff_std": float(probs_diff.std()),
        "rollout_corr/kl": float((rollout - trainer).mean()),
        "rollout_corr/k3_kl": float((np.expm1(d) - d).mean()),
        "rollout_corr/logprob_diff_max": float(np.abs(rollout - trainer).max()),
        "rollout_corr/ess": float(weights.sum() ** 2 / (len(weights) * (weights**2).sum())),
        "rollout_corr/ppl_ratio": float(np.exp(-means).mean()),
    }
