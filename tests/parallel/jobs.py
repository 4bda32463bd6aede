"""What tests run on every rank; engines come first, plain numpy goes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from grpo_mlm.data.batch import RolloutBatch
from grpo_mlm.engine.engine import MegatronEngine, Schedule
from grpo_mlm.engine.loss import StepLoss

Arrays = dict[str, np.ndarray]


def score(engine: MegatronEngine, batch: RolloutBatch, schedule: Schedule, which: str = "actor") -> Any:
    return engine.logprobs(batch, schedule, which)


def update(
    engine: MegatronEngine, batch: RolloutBatch, schedules: list[Schedule], weights: np.ndarray
) -> list[dict[str, Any]]:
    """One optimizer step a schedule."""
    return [engine.update(batch, schedule, weights) for schedule in schedules]


def weights(engine: MegatronEngine) -> Arrays:
    return {name: tensor.float().numpy().copy() for name, tensor in engine.parameters().items()}


def reference(engine: MegatronEngine) -> Arrays | None:
    return engine.ref and {name: tensor.float().numpy().copy() for name, tensor in engine.ref.items()}


def gradients(
    engine: MegatronEngine, batch: RolloutBatch, schedule: Schedule, weights: np.ndarray
) -> tuple[Arrays, float]:
    """Gradients as the optimizer would see them, and this replica's part of the loss (0 on other ranks)."""
    config = engine.config
    correction = config.algorithm.rollout_correction
    loss = StepLoss(config.actor, correction, batch, weights, None, engine.device.torch_device)
    with engine.device.active():
        micros = engine.passes.accumulate_gradients(engine._packs(batch, schedule), loss)
    grads = {name: param.main_grad.numpy().copy() for name, param in engine.gpt.named_parameters()}
    part = sum(micro.metrics["actor/loss"].value for micro in micros) if engine.place.reports else 0.0
    return grads, part


def optimizer_steps(engine: MegatronEngine) -> int:
    return engine.optimizer.steps


def export(engine: MegatronEngine, folder: Path) -> None:
    engine.export_hf(folder)
