"""A penalty for responses that come near the length limit."""

from __future__ import annotations

import numpy as np


def overlong_penalty(response_lens: np.ndarray, max_len: int, buffer_len: int, factor: float) -> np.ndarray:
    """What to add to each reward, float64 `[N]`, from 0 down to -factor; `response_lens` int `[N]`.

    0 up to `max_len - buffer_len` tokens, then linear, `-factor` at `max_len` and beyond: DAPO (arXiv 2503.14476),
    equation 13, with a factor.
    """
    over = response_lens - (max_len - buffer_len)
    return -factor * np.clip(over / buffer_len, 0.0, 1.0)
