"""One engine rank's layout, recorded from vLLM's own weight loaders.

The model is asked to load a checkpoint of stand-ins: canonical tensors without data, into parameters without data.
Loaders cut them as they cut real ones. So the layout of any model that vLLM loads is known, whatever its kernels
make of the parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Layout
from grpo_mlm.rollout.recording import Recording
from grpo_mlm.rollout.reload import checkpoint_parameters

Shape = tuple[int, ...]


@torch.no_grad()
def record_layout(model: nn.Module, canonical: Mapping[str, Shape], dtype: torch.dtype) -> Layout:
    """Which box of which canonical tensor (of `dtype`) the loaders of this rank put where.

    The model may be live, with its kernels' own layouts, or on the meta device (but for a map of experts, which
    loaders read); it is left as it was. Names are those of `loadable_shapes`; three dimensions and more are seen as
    a matrix. RunFailure naming tensor and parameter where a write is not a box, the loaders ignore a tensor, or
    nothing fills a part of a parameter.
    """
    with _stand_ins(model) as parameters:
        recording = Recording(parameters, canonical, dtype)
        with recording:
            try:
                load: Any = model.load_weights
                load(recording.checkpoint())
            except RunFailure:
                raise
            except Exception as error:
                cause = f"{type(error).__name__}: {error}"
                raise RunFailure(f"{recording.current}: the engine's loaders fail on it: {cause}") from error
    return recording.layout()


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Parameters in checkpoint layout, with their own loaders, take the places of the live ones for a while."""
    live = [(module, dict(module._parameters)) for module in model.modules()]
    by_name: dict[str, Tensor] = {}
    by_parameter: dict[int, Any] = {}  # a tied parameter stays one parameter
    try:
        for name, module, leaf, parameter, recorded in checkpoint_parameters(model):
            if id(parameter) not in by_parameter:
                stand_in: Any = restore_layer_refs(to_meta_tensor(recorded), module)
                stand_in.weight_loader = _get_original_loader(stand_in)
                by_name[name] = by_parameter[id(parameter)] = stand_in
            module._parameters[leaf] = by_parameter[id(parameter)]
        yield by_name
    finally:
        for module, parameters in live:
            module._parameters.update(parameters)
