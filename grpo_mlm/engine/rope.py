"""Inverse frequencies of the rotary embedding, as Hugging Face models define them.

GPTModel's own arguments fix the constants of Llama 3.1's stretching; models state their own, so the frequencies
are computed here and handed to its rotary module.
"""

from __future__ import annotations

import math

import torch

from grpo_mlm.layouts.model import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of channels, float32 `[head_dim / 2]`.

    Su et al. 2021 (arXiv 2104.09864): theta^(-2i/d). `linear` divides all by the factor (Chen et al. 2023,
    arXiv 2306.15595); `llama3` divides the long waves, keeps the short ones and blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling
    if scaling is None:
        return plain
    factor = scaling["factor"]
    if scaling["rope_type"] == "linear":
        return plain / factor
    assert scaling["rope_type"] == "llama3", scaling
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    # 0 at the longest wave that is still blended, 1 at the shortest; beyond these nothing is blended.
    keep = ((trained / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / factor + keep * plain
