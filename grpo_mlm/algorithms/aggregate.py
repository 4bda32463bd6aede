"""From one loss a token to one number: the weight of each token in the loss of a whole optimizer step.

Weights are made once, over every sample of the step, before it is cut into micro-batches and over ranks.
The step's loss is then a plain sum of weight x loss, and no cut of it can change loss or gradient.
"""

from __future__ import annotations

import numpy as np

from grpo_mlm.config.schema import LossAggMode


def token_weights(
    response_lens: np.ndarray, trained: np.ndarray, mode: LossAggMode, scale_factor: float | None = None
) -> np.ndarray:
    """Weights w, float64 `[R]`, of all response tokens: loss = sum_t w_t L_t. With S trained samples of T_i tokens:

    - `token-mean`: 1 / sum_i T_i (DAPO, arXiv 2503.14476, equation 8)
    - `seq-mean-token-mean`: 1 / (S T_i) (GRPO, arXiv 2402.03300, equation 3)
    - `seq-mean-token-sum`: 1 / S
    - `seq-mean-token-sum-norm`: 1 / (S scale_factor) (Dr.GRPO, arXiv 2503.20783, with its constant)

    `response_lens` int `[N]`, `trained` bool `[N]`. Samples that are not trained, or have no token, are in neither
    numerator nor denominator; samples of zero advantage are in both. Without trained tokens all weights are 0.
    """
    lens = response_lens.astype(np.float64)
    counted = trained & (response_lens > 0)
    samples = max(int(counted.sum()), 1)
    if mode == "token-mean":
        per_sample = np.full(len(lens), 1 / max(lens[counted].sum(), 1.0))
    elif mode == "seq-mean-token-mean":
        per_sample = 1 / (samples * np.maximum(lens, 1.0))
    elif mode == "seq-mean-token-sum":
        per_sample = np.full(len(lens), 1 / samples)
    elif scale_factor is not None:
        per_sample = np.full(len(lens), 1 / (samples * scale_factor))
    else:
        raise ValueError(f"actor.loss_agg_mode={mode} needs actor.loss_scale_factor, a positive number")
    return np.repeat(np.where(counted, per_sample, 0.0), response_lens)
