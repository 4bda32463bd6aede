"""A run's configuration: schema, files, checks. Imports neither torch nor ray nor vllm."""

from grpo_mlm.config.check import check_config, check_model
from grpo_mlm.config.load import dump_config, load_config
from grpo_mlm.config.schema import Config
from grpo_mlm.config.world import World, resolve_world

__all__ = ["Config", "World", "check_config", "check_model", "dump_config", "load_config", "resolve_world"]
