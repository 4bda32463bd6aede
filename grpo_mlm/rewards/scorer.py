"""A sample's reward: the weighted sum of every reward of the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_mlm.config.schema import RewardConfig
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.base import Reward, invalid
from grpo_mlm.rewards.registry import make_reward, short_names
from grpo_mlm.rewards.types import RewardResult, RewardSample

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt


class Scorer:
    """Scores samples from any event loop, one after the other or many at a time. `close` leaves no process."""

    def __init__(self, rewards: dict[str, Reward], weights: Sequence[float]):
        self._rewards = rewards
        self._weights = weights

    def check_rows(self, prompts: Sequence[Prompt]) -> None:
        """Before the first step: UserError for rows that a reward cannot score, a warning for unreadable golds."""
        for reward in self._rewards.values():
            reward.check(prompts)

    async def score(self, sample: RewardSample) -> RewardResult:
        """Weighted sum in `value`; every reward unweighted, and its parts as `name/part`, in `parts`.

        Invalid when any reward could not judge the sample; `seconds` is that of the slowest reward at work.
        """
        if sample.finish_reason == "abort":
            return invalid("aborted", "the engine gave no complete sample")
        results = await asyncio.gather(*(reward.score(sample) for reward in self._rewards.values()))
        parts: dict[str, float] = {}
        for name, result in zip(self._rewards, results, strict=True):
            parts[name] = result.value
            parts |= {f"{name}/{part}": value for part, value in result.parts.items()}
        failed = [r for r in results if r.invalid]
        notes = [r.reason for r in failed or results if r.reason]
        value = math.fsum(w * r.value for w, r in zip(self._weights, results, strict=True))
        return RewardResult(
            value=math.nan if failed else value,
            parts=parts,
            invalid=bool(failed),
            reason="; ".join(dict.fromkeys(notes)),
            seconds=max(r.seconds for r in results),
        )

    def close(self) -> None:
        for reward in self._rewards.values():
            reward.close()


def build_scorer(config: RewardConfig) -> Scorer:
    """Every reward of the config; UserError for what is wrong with one. Processes start with the first task."""
    names = short_names(config.functions)
    if not any(f.weight for f in config.functions):
        raise UserError("reward.functions: every weight is 0, so nothing is rewarded")
    rewards = {name: make_reward(f, config) for name, f in zip(names, config.functions, strict=True)}
    return Scorer(rewards, [f.weight for f in config.functions])
