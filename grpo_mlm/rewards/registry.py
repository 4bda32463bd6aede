"""The rewards by name."""

from __future__ import annotations

from collections.abc import Callable

from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig
from grpo_mlm.config.suggest import did_you_mean
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.base import Reward
from grpo_mlm.rewards.custom import FunctionReward
from grpo_mlm.rewards.exact_match import ExactMatchReward
from grpo_mlm.rewards.math_answer import MathReward
from grpo_mlm.rewards.reasoning_gym import ReasoningGymReward

REWARDS: dict[str, Callable[[RewardFunctionConfig, RewardConfig], Reward]] = {
    "exact_match": ExactMatchReward,
    "math": MathReward,
    "reasoning_gym": ReasoningGymReward,
}


def make_reward(function: RewardFunctionConfig, config: RewardConfig) -> Reward:
    """The reward of one entry of `reward.functions`; UserError for an unknown name, wrong kwargs, no such function."""
    if function.name in REWARDS:
        return REWARDS[function.name](function, config)
    if ":" in function.name:
        return FunctionReward(function, config)
    near = did_you_mean(function.name, REWARDS) or "."
    raise UserError(
        f"reward.functions: there is no reward {function.name!r}{near} "
        f"Known are {', '.join(REWARDS)}, or your own as module:function or path/to/file.py:function"
    )


def short_names(functions: list[RewardFunctionConfig]) -> list[str]:
    """What metrics call each reward: the function's name, or all of it where two would be called alike."""
    short = [f.name.rpartition(":")[2] for f in functions]
    names = [s if short.count(s) == 1 else f.name for s, f in zip(short, functions, strict=True)]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UserError(
            f"reward.functions: {twice[0]!r} is listed twice; give each reward once, with its weight"
        )
    return names
