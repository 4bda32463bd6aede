"""Adam by megatron-core, with a learning-rate schedule, and a step that all ranks take or none does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from grpo_mlm.config.schema import OptimConfig
from grpo_mlm.engine.device import Device
from grpo_mlm.engine.parallel import all_agree
from grpo_mlm.telemetry.reduce import Part


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did. `grad_norm` is before clipping, over all parameters, the same on every rank."""

    grad_norm: float
    lr: float
    skipped: bool

    def metrics(self) -> dict[str, Part]:
        """The same on every rank, so the greatest is each one's."""
        return {
            "actor/grad_norm": Part("max", self.grad_norm),
            "actor/lr": Part("max", self.lr),
            "actor/skipped_steps": Part("max", float(self.skipped)),
        }


class Optimizer:
    """Owns fp32 main weights and Adam's moments. `steps` counts the updates made, skipped ones not."""

    def __init__(
        self,
        config: OptimConfig,
        model: DistributedDataParallel,
        device: Device,
        dtype: torch.dtype,
        distributed: bool,
    ) -> None:
        self.config, self.device, self.steps = config, device, 0
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                clip_grad=config.clip_grad,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=distributed,
            ),
            [model],
            use_gloo_process_groups=False,
        )

    def learning_rate(self) -> float:
        """Of the next step: a linear rise over the warm-up, then constant."""
        warmup = self.config.lr_warmup_steps
        return self.config.lr * min(1.0, (self.steps + 1) / warmup if warmup else 1.0)

    def step(self, loss_is_finite: bool) -> StepResult:
        """One update from the gradients in the model's buffers, or none on any rank.

        A loss or gradient norm that is not finite anywhere leaves weights, moments and schedule as they are.
        """
        lr = self.learning_rate()
        self.megatron.prepare_grads()
        grad_norm = float(self.megatron.get_grad_norm())
        finite = all_agree(self.device, loss_is_finite and math.isfinite(grad_norm))
        if finite:
            self._apply(lr, grad_norm)
        # The main gradients are views of the model's buffers: left in place, the next backward would add to them.
        self.megatron.zero_grad()
        return StepResult(grad_norm, lr, skipped=not finite)

    def _apply(self, lr: float, grad_norm: float) -> None:
        for group in self.megatron.param_groups:
            group["lr"] = lr
            # megatron gives norms and biases a group of their own, with a multiplier of 0.
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        for part in self.megatron.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self.config.clip_grad, grad_norm)
        self.megatron.step_with_ready_grads()
        self.steps += 1
