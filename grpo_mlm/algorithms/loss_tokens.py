"""What the loss knows of each response token, besides the log-prob and entropy that it descends on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """Columns of R response tokens on one device; `[R]` each, float32 but for `sample` and `selected`."""

    advantages: Tensor
    weights: Tensor  # shares of the step's loss, by `aggregate.token_weights`
    sample: Tensor  # int64, which sample a token belongs to; tokens of a sample stand together
    old_logprobs: Tensor | None = None  # None: this very forward is the old policy
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    is_weights: Tensor | None = None  # of the decoupled rollout correction
    selected: Tensor | None = None  # bool, the tokens that `clip_cov` and `kl_cov` treat apart

    def take(self, rows: Tensor) -> LossTokens:
        """Some of the tokens; `rows` int64 `[r]`."""
        columns = ((field.name, getattr(self, field.name)) for field in fields(self))
        taken: dict[str, Any] = {name: None if c is None else c[rows] for name, c in columns}
        return LossTokens(**taken)
