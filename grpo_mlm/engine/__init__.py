"""The trainer's side: one Megatron process per accelerator."""

import warnings

# megatron-core says in every process which of its optional parts are absent, and objects to its own default.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
warnings.filterwarnings("ignore", message="full scope is deprecated")
