"""Which tokens drive the entropy down: those whose log-prob and advantage vary together."""

from __future__ import annotations

import numpy as np

from grpo_mlm.config.schema import PolicyLossConfig


def select_tokens(
    old_logprobs: np.ndarray,
    advantages: np.ndarray,
    trained: np.ndarray,
    config: PolicyLossConfig,
    rng: np.random.Generator,
) -> np.ndarray:
    """The tokens that `clip_cov` or `kl_cov` treat apart, bool `[R]`; all arguments `[R]`, `trained` bool.

    The covariance of token i is (logp_i - mean logp) (A_i - mean A), means over the trained tokens (arXiv 2505.22617,
    equation 9). `kl_cov`: the N `kl_cov_ratio` greatest of N trained tokens; `clip_cov`: so many of N `clip_cov_ratio`,
    at random, of those between `clip_cov_lb` and `clip_cov_ub`. At least one, where there is any.

    The log-probs are those of the policy before the optimizer step, over all tokens of the step: then no cut into
    micro-batches changes the selection. In the paper they are the current policy's, the same at the first update.
    """
    selected = np.zeros(len(trained), dtype=bool)
    tokens = np.flatnonzero(trained)
    if not len(tokens):
        return selected
    logp, adv = old_logprobs[tokens].astype(np.float64), advantages[tokens].astype(np.float64)
    covariance = (logp - logp.mean()) * (adv - adv.mean())
    if config.loss_mode == "kl_cov":
        count = max(1, int(len(tokens) * config.kl_cov_ratio))
        chosen = np.argsort(-covariance, kind="stable")[:count]
    else:
        between = np.flatnonzero((covariance > config.clip_cov_lb) & (covariance < config.clip_cov_ub))
        count = max(1, int(len(tokens) * config.clip_cov_ratio))
        chosen = rng.permutation(between)[:count]
    selected[tokens[chosen]] = True
    return selected
