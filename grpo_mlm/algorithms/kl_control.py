"""The weight of the KL inside the reward, fixed or steered towards a target."""

from __future__ import annotations

from grpo_mlm.config.schema import KLControlConfig

CLIP = 0.2  # the greatest relative error that one update answers to


class KLController:
    """`coef` is the weight of the next step. `update` follows the KL that a step measured."""

    def __init__(self, config: KLControlConfig) -> None:
        self.config, self.coef = config, config.kl_coef

    def update(self, kl: float, samples: int) -> None:
        """`coef *= 1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon`, with `kl` in nats a token.

        Ziegler et al. (arXiv 1909.08593), section 2.2. Nothing happens where the controller is fixed.
        """
        if self.config.type == "fixed":
            return
        assert self.config.target_kl is not None
        assert self.config.horizon is not None
        error = min(max(kl / self.config.target_kl - 1, -CLIP), CLIP)
        self.coef *= 1 + error * samples / self.config.horizon
