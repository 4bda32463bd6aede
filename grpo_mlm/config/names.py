"""Names that a config may use for functions: those of this package, and the user's own."""

from __future__ import annotations

import re

# Those that compare the samples of one prompt; the others of ADV_ESTIMATORS need no second sample.
GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "grpo_passk", "gdpo", "opo")
ADV_ESTIMATORS = (*GROUP_ESTIMATORS, "reinforce_plus_plus", "remax")
LOSS_MODES = (
    "vanilla", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"
)  # fmt: skip

_FUNCTION = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")


def is_function(name: str) -> bool:
    """Whether it is of the form `module:function` or `path/to/file.py:function`."""
    return _FUNCTION.fullmatch(name) is not None
