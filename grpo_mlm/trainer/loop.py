"""GRPO, one screen: sample, score, compare inside each group, update, hand the new weights back.

Shao et al. 2024, DeepSeekMath (arXiv 2402.03300), algorithm 1, with the options that the field added since.
From here to the loss: `actor.update` calls `engine/engine.py: MegatronEngine.update` on every rank, which goes
through `engine/forward.py` and `engine/loss.py` to `algorithms/grpo_loss.py`.
"""

from __future__ import annotations

import numpy as np

from grpo_mlm.algorithms.mismatch import rollout_mismatch
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.microbatch import minibatches
from grpo_mlm.telemetry.batch_metrics import batch_metrics
from grpo_mlm.telemetry.clock import Clock
from grpo_mlm.telemetry.reduce import over_steps
from grpo_mlm.trainer.advantages import batch_advantages, charge_kl, correct_rollouts
from grpo_mlm.trainer.run import Run
from grpo_mlm.trainer.sampling import sample_batch
from grpo_mlm.trainer.validate import validate


def train(run: Run) -> None:
    """Run every step of the configuration; what happens is in the run directory."""
    cfg = run.config
    run.sync_weights(version=0)
    if run.val_prompts and cfg.trainer.val_before_train:
        run.log(0, validate(run))
    for step in range(1, run.total_steps + 1):
        clock = Clock()
        batch, metrics = sample_batch(run, step, clock)
        with clock("old_log_prob"):
            batch.old_logprobs = run.old_logprobs(batch)
        with clock("ref"):
            if run.needs_reference:
                batch.ref_logprobs, _ = run.actor.logprobs(batch, "ref")
        with clock("adv"):
            metrics |= batch_metrics(batch) | charge_kl(batch, cfg.algorithm, run.kl_controller)
            batch.advantages, trained, group_metrics = batch_advantages(batch, cfg)
            metrics |= group_metrics | correct_rollouts(batch, cfg.algorithm.rollout_correction)
        with clock("update_actor"):
            metrics |= update(run, step, batch, trained)
        with clock("update_weights"):
            metrics |= run.sync_weights(version=step)
        if run.val_prompts and run.due(step, cfg.trainer.test_freq):
            with clock("testing"):
                metrics |= validate(run)
        if run.due(step, cfg.trainer.save_freq):
            with clock("save_checkpoint"):
                run.save_weights(step)
        run.log(step, metrics | clock.metrics(), batch)


def update(run: Run, step: int, batch: RolloutBatch, trained: np.ndarray) -> dict[str, float]:
    """Every epoch and mini-batch, one optimizer step each; one record of metrics for all."""
    cfg = run.config
    seen: list[dict[str, float]] = []
    bypass = cfg.algorithm.rollout_correction.mode == "bypass"  # then old log-probs are the sampler's own
    logprobs = None if bypass else batch.old_logprobs
    rng = np.random.default_rng([cfg.run.seed, step])
    for epoch in range(cfg.actor.ppo_epochs):
        for mini in minibatches(batch, cfg.mini_batch_size, epoch, seed=cfg.run.seed + step):
            if not trained[mini].any():
                continue  # nothing to learn from: no forward, no optimizer step
            metrics, forward_logprobs = run.actor.update(batch, mini, trained, rng)
            logprobs = forward_logprobs if logprobs is None else logprobs
            seen.append(metrics)
            run.check_skipped(metrics)
    metrics = over_steps(seen) | {"actor/optimizer_steps": float(len(seen))}
    if logprobs is not None:
        metrics |= rollout_mismatch(batch.rollout_logprobs, logprobs, batch.response_lens)
    return metrics
