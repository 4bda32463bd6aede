"""From rewards to advantages: how much better a sample is than the others of its prompt, or of the batch.

One function an estimator, all with one signature, in the registry `ADVANTAGES`. r_i is the reward of sample i; means
and deviations are over the n valid samples of its prompt unless said otherwise; deviations are sample standard
deviations (ddof 1). An invalid sample has no part in any statistic and no advantage. Where all rewards of a prompt are
equal, the estimators that compare the samples of a prompt give exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from grpo_mlm.algorithms.groups import Groups, Scored
from grpo_mlm.config.functions import load_function
from grpo_mlm.config.schema import AlgorithmConfig
from grpo_mlm.errors import UserError

STD_EPS = 1e-6  # added to a standard deviation before it divides


@dataclass(frozen=True)
class Advantages:
    """One advantage a sample, and which samples the loss and its denominators may count."""

    values: np.ndarray  # float64 [N], 0 where not trained
    trained: np.ndarray  # bool [N]: valid, and with something to be compared with
    metrics: dict[str, float]


AdvantageEstimator = Callable[[Scored, AlgorithmConfig], Advantages]


def grpo(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = (r_i - mean) / (std + 1e-6)`.

    DeepSeekMath (arXiv 2402.03300), section 4.1.2. Without `norm_adv_by_std_in_grpo` it is `dr_grpo`.
    A group whose valid rewards are all equal stays in the loss's denominators.
    """
    groups = _groups(scored)
    scale = groups.std + STD_EPS if config.norm_adv_by_std_in_grpo else np.ones_like(groups.std)
    return _compared(groups, groups.centred / scale[groups.of])


def dr_grpo(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = r_i - mean`.

    Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2: dividing by the std favours prompts that are
    too easy or too hard.
    """
    groups = _groups(scored)
    return _compared(groups, groups.centred)


def rloo(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = r_i - mean of the others = (r_i - mean) n / (n - 1)`.

    Back to Basics (arXiv 2402.14740), equation 8 (REINFORCE leave-one-out).
    """
    groups = _groups(scored)
    factor = groups.count / np.maximum(groups.count - 1, 1)
    return _compared(groups, groups.centred * factor[groups.of])


def opo(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = r_i - sum_j T_j r_j / sum_j T_j`, T_j the length of response j.

    On-Policy RL with Optimal Reward Baseline (arXiv 2505.23585), equation 9: the baseline of least variance, when the
    gradient of a response grows with its length.
    """
    groups = _groups(scored)
    lengths = scored.response_lens.astype(np.float64)
    baseline = groups.total(lengths * groups.values) / np.maximum(groups.total(lengths), 1)
    return _compared(groups, np.where(groups.equal[groups.of], 0.0, groups.values - baseline[groups.of]))


def grpo_passk(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """Only the best sample of a prompt has an advantage, `r_max - r_second`, over std + 1e-6 with
    `norm_adv_by_std_in_grpo`. Of several best ones the first.

    For pass@k: arXiv 2503.19595, equation 6 (the leave-one-out gain of the maximum).
    """
    groups = _groups(scored)
    order = np.lexsort((np.arange(len(groups.of)), -groups.values, ~groups.valid, groups.of))
    first = np.ones(len(order), dtype=bool)
    first[1:] = groups.of[order][1:] != groups.of[order][:-1]
    best = np.flatnonzero(first)
    values = np.zeros(len(order))
    has_two = groups.count >= 2
    second = np.minimum(best + 1, len(order) - 1)
    gain = groups.values[order[best]] - groups.values[order[second]]
    scale = groups.std + STD_EPS if config.norm_adv_by_std_in_grpo else np.ones_like(groups.std)
    values[order[best]] = np.where(has_two, gain / scale, 0.0)
    return _compared(groups, values)


def gdpo(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """Each component of the reward is normalised by itself, then weighed: with w_k its weight and A_i^k as in `grpo`,

        B_i = sum_k w_k A_i^k,     A_i = (B_i - mean of the batch's B) / (std of the batch's B + 1e-6).

    GDPO (arXiv 2601.05242), equations 4 to 7. Normalising the sum, as `grpo` does, makes different mixes of components
    look alike. UserError where a sample lacks a component.
    """
    groups = _groups(scored)
    total = np.zeros(len(groups.of))
    for name, weight in scored.part_weights.items():
        part = Groups.of_values(_part(scored, name), scored.group_id, groups.valid)
        total += weight * part.centred / (part.std + STD_EPS)[part.of]
    trained = groups.valid & (groups.count >= 2)[groups.of]
    spread = total[trained].std(ddof=1) if trained.sum() > 1 else 0.0
    centred = np.where(trained, total - total[trained].mean(), 0.0) if trained.any() else total
    return _compared(groups, centred / (spread + STD_EPS) if spread else np.zeros_like(total))


def reinforce_plus_plus(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = (r_i - mean) / (std + 1e-6)` over all tokens of the batch, each carrying its sample's reward.

    REINFORCE++ (arXiv 2501.03262), equations 4 and 5, for a reward at the end of the response and no discount. Needs no
    second sample of a prompt.
    """
    valid = scored.valid & np.isfinite(scored.rewards)
    return _of_batch(scored, np.where(valid, scored.rewards, 0.0), valid)


def reinforce_plus_plus_baseline(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`r_i - mean` of the prompt, then divided by the std over all tokens of the batch, their mean taken off.

    REINFORCE++ with baseline (arXiv 2501.03262), equations 6 and 7.
    """
    groups = _groups(scored)
    trained = groups.valid & (groups.count >= 2)[groups.of]
    whitened = _of_batch(scored, groups.centred, trained)
    values = np.where(groups.equal[groups.of], 0.0, whitened.values)
    return Advantages(values, whitened.trained, _metrics(groups))


def remax(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """`A_i = r_i - r_greedy`, the reward of the greedy response to the same prompt.

    ReMax (arXiv 2310.10505), equation 5. Samples whose greedy response could not be judged are not trained.
    """
    if scored.baseline is None:
        raise UserError(
            "algorithm.adv_estimator=remax: the batch has no rewards of greedy responses; it was saved by a run with "
            "another estimator"
        )
    trained = scored.valid & np.isfinite(scored.rewards) & np.isfinite(scored.baseline)
    values = np.where(trained, scored.rewards, 0.0) - np.where(trained, scored.baseline, 0.0)
    return Advantages(values, trained, {"critic/greedy_reward/mean": _mean(scored.baseline[trained])})


ADVANTAGES: dict[str, AdvantageEstimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "opo": opo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
}


def estimate_advantages(scored: Scored, config: AlgorithmConfig) -> Advantages:
    """By `config.adv_estimator`: a name of `ADVANTAGES`, or the user's own function with the same signature.

    UserError where that one does not return finite `Advantages` for every sample.
    """
    name = config.adv_estimator
    if name in ADVANTAGES:
        return ADVANTAGES[name](scored, config)
    found = load_function(name, "algorithm.adv_estimator")(scored, config)
    wanted = f"algorithm.adv_estimator={name}: expected Advantages with values and trained of {len(scored.rewards)}"
    if not isinstance(found, Advantages):
        raise UserError(f"{wanted} samples, got {type(found).__name__}")
    shapes = np.shape(found.values), np.shape(found.trained)
    if shapes != (np.shape(scored.rewards),) * 2 or not np.isfinite(found.values).all():
        raise UserError(f"{wanted} samples, all of them finite; got shapes {shapes[0]} and {shapes[1]}")
    trained = np.asarray(found.trained, dtype=bool) & scored.valid
    return Advantages(np.where(trained, found.values, 0.0), trained, dict(found.metrics))


def _groups(scored: Scored) -> Groups:
    return Groups.of_values(scored.rewards, scored.group_id, scored.valid)


def _part(scored: Scored, name: str) -> np.ndarray:
    if name not in scored.parts:
        raise UserError(
            f"algorithm.adv_estimator=gdpo: no sample has the reward {name!r}; there are "
            + (", ".join(scored.parts) or "none")
        )
    return scored.parts[name]


def _compared(groups: Groups, values: np.ndarray) -> Advantages:
    """Samples with no other to be compared with are not trained."""
    trained = groups.valid & (groups.count >= 2)[groups.of]
    return Advantages(np.where(trained, values, 0.0), trained, _metrics(groups))


def _of_batch(scored: Scored, values: np.ndarray, trained: np.ndarray) -> Advantages:
    """Whitened over the tokens of the trained samples; a batch of equal values has advantage exactly 0."""
    tokens = np.where(trained, scored.response_lens, 0).astype(np.float64)
    count = tokens.sum()
    equal = not trained.any() or np.ptp(values[trained]) == 0
    if equal or count < 2:
        return Advantages(np.zeros(len(values)), trained, {})
    centred = values - (tokens * values).sum() / count
    std = np.sqrt((tokens * centred**2).sum() / (count - 1))
    return Advantages(np.where(trained, centred / (std + STD_EPS), 0.0), trained, {})


def _metrics(groups: Groups) -> dict[str, float]:
    comparable = groups.count >= 2
    return {
        "groups/equal_rewards_fraction": float((groups.equal & comparable).sum() / max(len(comparable), 1)),
        "groups/too_few_valid": float((~comparable).sum()),
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
