"""How a device computes transformer layers: what `model.py` and `forward.py` ask of either side of the seam."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from grpo_mlm.data.microbatch import PackedSequences
from grpo_mlm.engine.device import Device
from grpo_mlm.layouts.model import ModelSpec


@dataclass(frozen=True)
class Layers:
    """The layers of one model on one device.

    `settings` are fields of TransformerConfig. `rotary` says who rotates: "rope" is GPTModel, "none" the attention
    itself. `packed` tells the attention where the segments of a micro-batch begin.
    """

    stage: Callable[[TransformerConfig], TransformerBlockSubmodules | ModuleSpec]
    packed: Callable[[PackedSequences], PackedSeqParams]
    settings: dict[str, Any]
    rotary: Literal["rope", "none"]


def layers_on(device: Device, spec: ModelSpec, dtype: torch.dtype) -> Layers:
    """Our parts in megatron's local spec on a CPU, Transformer Engine on a GPU."""
    if device.is_cpu:
        from grpo_mlm.engine.cpu.layers import cpu_layers

        return cpu_layers(spec, dtype)
    from grpo_mlm.engine.transformer_engine import te_layers

    return te_layers(spec, device)


def with_output_bias(attention: Any) -> None:
    """Give the attention's output layer a bias: megatron has one switch for this one and the MLP's."""
    linear = attention.linear_proj

    class WithBias(linear):  # type: ignore[valid-type, misc]
        def __init__(self, *args: Any, bias: bool, **kwargs: Any) -> None:
            super().__init__(*args, bias=True, **kwargs)

    attention.linear_proj = WithBias
