"""A run's parts, brought up in order and taken down in reverse: prompts, rewards, Ray, trainer, engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from grpo_mlm.algorithms.kl_control import KLController
from grpo_mlm.cluster.actor_group import ActorGroup
from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.cluster.placement import ray_cluster, reserve
from grpo_mlm.cluster.start import start_actor, start_engines, wait_until_ready
from grpo_mlm.cluster.weight_sync import WeightSync
from grpo_mlm.config.schema import Config
from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.data.prompts import Prompt
from grpo_mlm.data.sampler import PromptSampler
from grpo_mlm.errors import RunFailure
from grpo_mlm.rewards.scorer import Scorer, build_scorer
from grpo_mlm.telemetry.console import RunConsole
from grpo_mlm.telemetry.samples import write_samples
from grpo_mlm.telemetry.trackers import JsonlTracker, TensorBoardTracker, Tracker
from grpo_mlm.trainer.prepare import Prepared
from grpo_mlm.trainer.run_dir import create_run_dir


@dataclass
class Run:
    """Everything that `loop.train` works with."""

    config: Config
    folder: Path
    train_prompts: list[Prompt]
    val_prompts: list[Prompt]  # empty while steps replay a saved batch
    sampler: PromptSampler
    scorer: Scorer
    actor: ActorGroup
    engines: EngineGroup | None  # None while steps replay a saved batch
    weights: WeightSync | None
    console: RunConsole
    trackers: list[Tracker]
    total_steps: int
    kl_controller: KLController
    skipped_in_a_row: int = 0
    validations: list[dict[str, float]] = field(default_factory=list)  # in order

    @property
    def needs_reference(self) -> bool:
        return self.config.actor.use_kl_loss or self.config.algorithm.use_kl_in_reward

    def old_logprobs(self, batch: RolloutBatch) -> np.ndarray | None:
        """Log-probs `[R]` of the policy that the ratio is taken against: the sampler's own in bypass mode, else the
        actor's before the step. None where one optimizer step uses the whole batch and nothing else asks for them:
        its own forward, detached, is the old policy.

        Asked of the batch, for one that was saved may have more prompts than `data.train_batch_size`.
        """
        cfg, correction = self.config, self.config.algorithm.rollout_correction
        if correction.mode == "bypass":
            return batch.rollout_logprobs
        needed = (
            cfg.actor.ppo_epochs > 1
            or cfg.mini_batch_size < len(set(batch.group_id.tolist()))
            or cfg.algorithm.use_kl_in_reward
            or correction.active
            or cfg.actor.policy_loss.loss_mode in ("clip_cov", "kl_cov")
        )
        return self.actor.logprobs(batch, "actor")[0] if needed else None

    def due(self, step: int, every: int) -> bool:
        """Whether something that happens `every` so many steps, and after the last, happens now."""
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def sync_weights(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to the engines, which then sample as `version`."""
        return self.weights.sync(version) if self.weights else {}

    def save_weights(self, step: int) -> None:
        """Write the actor as a Hugging Face folder, `checkpoints/step_N`."""
        self.actor.call("export_hf", self.folder / "checkpoints" / f"step_{step}")

    def check_skipped(self, metrics: dict[str, float]) -> None:
        """Stop the run when too many optimizer steps in a row were skipped as non-finite."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if metrics.get("actor/skipped_steps") else 0
        if self.skipped_in_a_row >= self.config.actor.max_skipped_steps:
            raise RunFailure(
                f"{self.skipped_in_a_row} optimizer steps in a row had a non-finite loss or gradient "
                "(actor.max_skipped_steps); lower actor.optim.lr or look at the last batch"
            )

    def log(self, step: int, metrics: dict[str, float], batch: RolloutBatch | None = None) -> None:
        """Metrics to every tracker, the step's line and a few samples to the console, all samples to a file."""
        if batch is not None:
            metrics["perf/throughput"] = len(batch.tokens) / metrics["timing_s/step"]
            metrics["data/epoch"] = float(self.sampler.epoch)
            write_samples(batch, self.folder / "samples" / f"step_{step}.jsonl")
            self.console.samples(batch, self.config.trainer.log_samples)
        if any(name.startswith("val-core/") for name in metrics):
            self.validations.append(metrics)
        for tracker in self.trackers:
            tracker.log(step, metrics)
        self.console.step(step, self.total_steps, metrics)

    def summarize(self) -> None:
        """First and last validation, and where to look."""
        say = self.console.say
        if self.validations:
            first, last = self.validations[0], self.validations[-1]
            for name in last:
                if name.startswith("val-core/"):
                    say(f"{name}: {first.get(name, float('nan')):.3f} -> {last[name]:.3f}")
        say(f"metrics      {self.folder / 'metrics.jsonl'}")
        say(f"samples      {self.folder / 'samples'}")
        if self.config.trainer.save_freq > 0:
            say(f"checkpoints  {self.folder / 'checkpoints'}")
        if "tensorboard" in self.config.trainer.logger:
            say(f"curves       tensorboard --logdir {self.folder / 'tensorboard'}")


@contextmanager
def open_run(config: Config, prepared: Prepared) -> Iterator[Run]:
    """Bring everything up; whatever way the run ends, everything goes down again."""
    folder = create_run_dir(config)
    console = RunConsole(quiet="console" not in config.trainer.logger)
    console.say(f"run directory {folder}")
    world, device = prepared.world, prepared.device
    colocated = config.cluster.placement == "colocated"
    timeout = config.cluster.start_timeout_s
    with ExitStack() as stack:
        trackers: list[Tracker] = [JsonlTracker(folder / "metrics.jsonl")]
        if "tensorboard" in config.trainer.logger:
            trackers.append(TensorBoardTracker(folder / "tensorboard"))
        for tracker in trackers:
            stack.callback(tracker.close)
        scorer = build_scorer(config.reward)
        stack.callback(scorer.close)
        console.say(f"starting {world.describe()} on {device}")
        began = time.perf_counter()
        stack.enter_context(ray_cluster(config.cluster, device, world.devices))
        slots = stack.enter_context(reserve(world.devices, device, timeout))
        engines = weights = None
        if config.trainer.debug.load_rollouts is None:
            loading = start_engines(config, prepared.model_folder, world, slots, folder, device)
            engines = stack.enter_context(loading)
            if device == "cuda" and colocated:
                # One after the other: an engine measures how much of its device is free.
                wait_until_ready(engines, timeout)
                engines.call("release_memory")
        actor = stack.enter_context(start_actor(config, prepared.model_folder, world, slots, folder))
        if engines:
            wait_until_ready(engines, timeout)
            weights = WeightSync(
                actor,
                engines,
                str(prepared.model_folder),
                world,
                colocated=colocated,
                te=device == "cuda",
                nodes=[slot.node for slot in slots],
                start_timeout_s=timeout,
            )
        console.say(f"started in {time.perf_counter() - began:.0f} s")
        yield Run(
            config=config,
            folder=folder,
            train_prompts=prepared.train_prompts,
            val_prompts=prepared.val_prompts if engines else [],
            sampler=PromptSampler(
                len(prepared.train_prompts),
                config.data.train_batch_size,
                config.data.shuffle,
                config.run.seed,
            ),
            scorer=scorer,
            actor=actor,
            engines=engines,
            weights=weights,
            console=console,
            trackers=trackers,
            total_steps=prepared.total_steps,
            kl_controller=KLController(config.algorithm.kl_ctrl),
        )
