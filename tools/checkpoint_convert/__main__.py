"""The same commands, options and exit codes as `grpo-mlm convert`."""

from grpo_mlm.cli import main
from grpo_mlm.convert.cli import app

main(app, "python -m tools.checkpoint_convert")
