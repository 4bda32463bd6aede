"""Puts whole tensors of one engine rank into a live vLLM model, through vLLM's layerwise reload.

Layerwise reload takes each module's parameters in checkpoint layout, lays them out for its kernel and copies the
result into the storage that the module already uses. vLLM's own loaders would slice full tensors; here they are
replaced by a plain copy, because the rank gets exactly its slices.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    get_layerwise_info,
    make_online_process_loader,
)
from vllm.platforms import current_platform

# It warns of modules without weights of their own (rotary tables, tied heads) at every update; that every
# parameter arrives is checked by name before the first one.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


class Reload:
    """One update of a model, from `__init__` to `finish`; in between the model cannot be used.

    An update that breaks off must be finished too: the model then holds garbage, but can be updated again.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, model_config: ModelConfig) -> None:
        self.model, self.model_config = model, model_config
        self._loaders: list[tuple[Any, Any]] = []
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Hand over one parameter, which belongs to the model from now on."""
        module, _, leaf = name.rpartition(".")
        layer = self.model.get_submodule(module)
        param: Any = getattr(layer, leaf)
        # The recorded parameter is used again by the next update: its own loader comes back at the end.
        self._loaders.append((param, _get_original_loader(param)))
        param.weight_loader = _copy_whole
        param.weight_loader = make_online_process_loader(layer, leaf)
        param.weight_loader(param, tensor)

    @torch.no_grad()
    def finish(self) -> None:
        """Make the model usable again."""
        finalize_layerwise_reload(self.model, self.model_config)
        for param, loader in self._loaders:
            param.weight_loader = loader
        if current_platform.is_cpu():
            _pack_heads(self.model)


def _copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def _pack_heads(model: nn.Module) -> None:
    """On a CPU a tied head computes with a packed copy of the embedding, which the reload forgets."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def loadable_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter as it is loaded, which a kernel's own layout may hide in the live model.

    A tied head is an alias of the embedding and is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        recorded, _ = get_layerwise_info(module).restore_metadata
        for leaf, live in module._parameters.items():
            if live is not None and id(live) not in seen:
                seen.add(id(live))
                shapes[f"{prefix}.{leaf}"] = tuple(recorded.get(leaf, live).shape)
    return shapes
