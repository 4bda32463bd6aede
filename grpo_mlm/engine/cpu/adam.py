"""Adam for the CPU in the shape of Transformer Engine's and apex's FusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class CpuFusedAdam(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019) with torch's fused CPU kernel, one pass over each parameter.

    megatron-core expects of an Adam that the step count lives in the parameter group and the state is exactly
    `exp_avg` and `exp_avg_sq`; with torch's own AdamW its distributed optimizer cannot be resumed correctly.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue  # megatron gives every rank the same groups, some of them empty
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None and p.numel()]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            step = torch.tensor(float(group["step"]))
            if params:
                torch._fused_adamw_(
                    params,
                    [p.grad for p in params],
                    [self.state[p]["exp_avg"] for p in params],
                    [self.state[p]["exp_avg_sq"] for p in params],
                    [],
                    [step.clone() for _ in params],
                    amsgrad=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
