"""The batch of a step: prompts sampled and scored until there are groups enough to learn from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from grpo_mlm.algorithms.filters import groups_to_keep
from grpo_mlm.algorithms.overlong import overlong_penalty
from grpo_mlm.config.schema import Config
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.prompts import Prompt
from grpo_mlm.data.regroup import join_batches, take_samples
from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.request import Sampling
from grpo_mlm.telemetry.clock import Clock
from grpo_mlm.trainer.advantages import scored
from grpo_mlm.trainer.assemble import Finished, assemble
from grpo_mlm.trainer.rollout import make_requests, rollout

if TYPE_CHECKING:
    from grpo_mlm.trainer.run import Run


def sample_batch(run: Run, step: int, clock: Clock) -> tuple[RolloutBatch, dict[str, float]]:
    """This step's batch and what its sampling counted; or the saved batch that stands in for it."""
    debug = run.config.trainer.debug
    if debug.load_rollouts is not None:
        with clock("gen"):
            return RolloutBatch.load(debug.load_rollouts).without_training_columns(), {}
    with clock("gen"):
        batch, metrics, scoring_seconds = _enough_groups(run, step)
        if debug.save_rollouts is not None:
            batch.save(debug.save_rollouts / f"step_{step}.safetensors")
        if run.config.cluster.placement == "colocated":
            assert run.engines is not None
            run.engines.call("release_memory")
    clock.move("gen", "reward", scoring_seconds)
    return batch, metrics


def _enough_groups(run: Run, step: int) -> tuple[RolloutBatch, dict[str, float], float]:
    """Without `algorithm.filter_groups`, one batch of prompts. With it, dynamic sampling (DAPO, arXiv 2503.14476,
    equation 11): more of them, until as many groups as a batch has are kept. What is too much is dropped."""
    cfg = run.config
    filters, wanted = cfg.algorithm.filter_groups, cfg.data.train_batch_size
    kept: list[RolloutBatch] = []
    found = sampled = 0
    seconds = 0.0
    for _ in range(filters.max_num_gen_batches if filters.enable else 1):
        batch, scoring_seconds = _sample_prompts(run, step)
        seconds += scoring_seconds
        if not filters.enable:
            return batch, {}, seconds
        sampled += wanted
        batch = take_samples(batch, np.flatnonzero(groups_to_keep(scored(batch, cfg), filters)))
        kept.append(batch)
        found += len(np.unique(batch.group_id))
        if found >= wanted:
            joined = join_batches(kept)
            first = joined.group_id[np.sort(np.unique(joined.group_id, return_index=True)[1])][:wanted]
            chosen = take_samples(joined, np.flatnonzero(np.isin(joined.group_id, first)))
            counts = {"groups/sampled": float(sampled), "groups/filtered": float(sampled - found)}
            return chosen, counts, seconds
    raise RunFailure(
        f"algorithm.filter_groups: {sampled} prompts gave {found} groups that tell samples apart, "
        f"data.train_batch_size={wanted} are needed (algorithm.filter_groups.max_num_gen_batches="
        f"{filters.max_num_gen_batches}); the prompts are too easy or too hard for this model: choose others, raise "
        "the limit, or lower data.train_batch_size"
    )


def _sample_prompts(run: Run, step: int) -> tuple[RolloutBatch, float]:
    """`rollout.n` scored samples of each of the next prompts, and the seconds of scoring that sampling did not hide."""
    cfg = run.config
    prompts = {group: run.train_prompts[row] for group, row in run.sampler.next()}
    finished, seconds = _generate(
        run, prompts, cfg.rollout.n, _training_sampling(cfg, cfg.rollout.temperature), step
    )
    batch = assemble(finished)
    check_samples(run, batch)
    if cfg.reward.overlong_buffer.enable:
        _charge_length(batch, cfg)
    if cfg.algorithm.adv_estimator == "remax":
        greedy, more = _generate(run, prompts, 1, _training_sampling(cfg, 0.0), step)
        reward = {s.group_id: np.nan if s.result.invalid else s.result.value for s in greedy}
        batch.baseline = np.array([reward[group] for group in batch.group_id.tolist()])
        seconds += more
    return batch, seconds


def _generate(
    run: Run, prompts: dict[int, Prompt], n: int, sampling: Sampling, step: int
) -> tuple[list[Finished], float]:
    assert run.engines is not None
    requests = make_requests(prompts, n, run.config.run.seed, step)
    timeout_s = run.config.cluster.call_timeout_s
    with run.console.generating(len(requests)) as advance:
        return rollout(run.engines, run.scorer, prompts, requests, sampling, advance, timeout_s)


def _training_sampling(cfg: Config, temperature: float) -> Sampling:
    r = cfg.rollout
    return Sampling(temperature, cfg.data.max_response_length, r.top_p, r.top_k, tuple(r.stop))


def _charge_length(batch: RolloutBatch, cfg: Config) -> None:
    """The soft overlong punishment, as a part of the reward."""
    buffer = cfg.reward.overlong_buffer
    penalty = overlong_penalty(
        batch.response_lens, cfg.data.max_response_length, buffer.len, buffer.penalty_factor
    )
    batch.reward = batch.reward + penalty
    batch.reward_parts["overlong"] = np.where(batch.valid, penalty, np.nan)


def check_samples(run: Run, batch: RolloutBatch) -> None:
    """RunFailure where the step cannot be trained on: samples of other weights than the actor's, longer ones than
    allowed, too many invalid ones."""
    longest, allowed = int(batch.response_lens.max()), run.config.data.max_response_length
    if longest > allowed:
        raise RunFailure(f"an engine returned {longest} tokens, data.max_response_length is {allowed}")
    versions = set(batch.weight_version.tolist())
    if run.weights and versions != {run.weights.version}:
        raise RunFailure(
            f"samples of weights {sorted(versions)}, the last sync brought {run.weights.version}"
        )
    run.console.invalid(batch)
    fraction, limit = 1 - batch.valid.mean(), run.config.reward.max_invalid_fraction
    if fraction > limit:
        reasons = sorted({reason for reason, ok in zip(batch.reason, batch.valid, strict=True) if not ok})
        raise RunFailure(
            f"{fraction:.0%} of the step's samples are invalid, more than reward.max_invalid_fraction={limit}: "
            + "; ".join(reasons[:5])
        )
