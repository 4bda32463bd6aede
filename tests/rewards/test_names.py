"""The config checks names of rewards without importing them; both lists must be one."""

from grpo_mlm.config.check import BUILTIN_REWARDS
from grpo_mlm.rewards.registry import REWARDS


def test_the_config_knows_exactly_the_registered_rewards() -> None:
    assert set(BUILTIN_REWARDS) == set(REWARDS)
