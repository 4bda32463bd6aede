"""Inverse frequencies by hand and against transformers (CNV-06)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_mlm.engine.rope import inverse_frequencies
from grpo_mlm.layouts.model import Rope

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_theta_is_the_models_own() -> None:
    assert inverse_frequencies(Rope(1e6), 8)[1].item() == pytest.approx(0.0316228, rel=1e-5)
    assert inverse_frequencies(Rope(1e4), 8)[1].item() == pytest.approx(0.1, rel=1e-6)


def test_linear_scaling_divides_every_frequency() -> None:
    plain = inverse_frequencies(Rope(1e4), 8)
    scaled = inverse_frequencies(Rope(1e4, {"rope_type": "linear", "factor": 8.0}), 8)
    torch.testing.assert_close(scaled, plain / 8)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(Rope(1e4), 64)
    scaled = inverse_frequencies(Rope(1e4, {"rope_type": "llama3", **LLAMA3}), 64)
    wavelength = 2 * torch.pi / plain
    short, long = wavelength < 64 / 4, wavelength > 64
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8)


@pytest.mark.parametrize(
    "scaling", [{"rope_type": "linear", "factor": 3.0}, {"rope_type": "llama3", **LLAMA3}]
)
@pytest.mark.parametrize("head_dim", [32, 128])
def test_frequencies_equal_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        rope_parameters={"rope_theta": 5e5, **scaling},
    )
    expected, _ = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(Rope(5e5, scaling), head_dim), expected, rtol=1e-6, atol=0)
