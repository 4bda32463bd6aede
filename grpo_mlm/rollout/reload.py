"""Puts whole tensors of one engine rank into a live vLLM model, through vLLM's layerwise reload.

Layerwise reload takes each module's parameters in checkpoint layout, lays them out for its kernel and copies the
result into the storage that the module already uses. vLLM's own loaders would slice full tensors; here they are
replaced by a plain copy, because the rank gets exactly its slices.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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

from grpo_mlm.layouts.boxes import matrix_shape

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
        self._kernels = _forget_expert_kernels(model) if current_platform.is_cpu() else []
        initialize_layerwise_reload(model)

    @torch.no_grad()
    def load(self, name: str, tensor: Tensor) -> None:
        """Hand over one parameter, which belongs to the model from now on; experts may come as a matrix."""
        module, _, leaf = name.rpartition(".")
        layer = self.model.get_submodule(module)
        param: Any = getattr(layer, leaf)
        # The recorded parameter is used again by the next update: its own loader comes back at the end.
        self._loaders.append((param, _get_original_loader(param)))
        param.weight_loader = _copy_whole
        param.weight_loader = make_online_process_loader(layer, leaf)
        param.weight_loader(param, tensor.view(param.shape))

    @torch.no_grad()
    def finish(self) -> None:
        """Make the model usable again."""
        finalize_layerwise_reload(self.model, self.model_config)
        for param, loader in self._loaders:
            param.weight_loader = loader
        for quant_method, kernel in self._kernels:
            quant_method.moe_kernel = quant_method.moe_kernel or kernel
        if current_platform.is_cpu():
            _pack_heads(self.model)


def _copy_whole(param: Tensor, loaded_weight: Tensor) -> None:
    param.data.copy_(loaded_weight)


def _forget_expert_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """On a CPU experts compute with packed weights, and are packed only while they have no kernel yet.

    Returns what was forgotten. Where a layer gets no weights it makes no new kernel and needs its old one.
    """
    kernels = []
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if getattr(quant_method, "moe_kernel", None) is not None:
            kernels.append((quant_method, quant_method.moe_kernel))
            quant_method.moe_kernel = None
    return kernels


def _pack_heads(model: nn.Module) -> None:
    """On a CPU a tied head computes with a packed copy of the embedding, which the reload forgets."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def checkpoint_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor, Tensor]]:
    """(name, its module, its name there, the live parameter, the same as it is loaded), tied ones under each name.

    A kernel's own layout may hide in the live model what is loaded; vLLM keeps that as tensors without data.
    """
    for prefix, module in model.named_modules():
        recorded, _ = get_layerwise_info(module).restore_metadata
        for leaf, live in list(module._parameters.items()):
            if live is not None:
                yield f"{prefix}.{leaf}", module, leaf, live, recorded.get(leaf, live)


def loadable_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter as it is loaded; three dimensions and more seen as a matrix.

    A tied head is an alias of the embedding and is left out.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    seen: set[int] = set()
    for name, _, _, live, loaded in checkpoint_parameters(model):
        if id(live) not in seen:
            seen.add(id(live))
            shapes[name] = matrix_shape(tuple(loaded.shape))
    return shapes
