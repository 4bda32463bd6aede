"""The command `grpo-mlm convert`, run from a checkout: `python -m tools.checkpoint_convert --help`."""
