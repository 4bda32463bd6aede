"""One engine rank's layout, recorded from vLLM's own weight loaders.

The model is asked to load a checkpoint of stand-ins: canonical tensors without data, into parameters without data.
Loaders cut such tensors as they cut real ones; a dispatch mode sees every write, and offset, sizes and strides of
both sides say which box went where. So any model that vLLM loads has its layout, whatever the kernels make of the
parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Box, Layout, Piece, matrix_shape
from grpo_mlm.layouts.coverage import layout_faults
from grpo_mlm.layouts.merge import merge_pieces
from grpo_mlm.rollout.strided import box_of

Shape = tuple[int, ...]

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_FILLS = {
    torch.ops.aten.zero_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
}


@torch.no_grad()
def record_layout(model: nn.Module, canonical: Mapping[str, Shape], dtype: torch.dtype) -> Layout:
    """Which box of which canonical tensor this rank's loaders put where; `dtype` is the canonical tensors'.

    The model may be live, with its kernels' own layouts, or on the meta device; it is left as it was. Shapes are
    those of `loadable_shapes`, three dimensions and more seen as a matrix. RunFailure naming tensor and parameter
    where a write is not a box, where the loaders ignore a tensor, or where a parameter is not filled.
    """
    with _stand_ins(model) as parameters:
        recorder = _Recorder(parameters)
        with recorder:
            try:
                model.load_weights(recorder.checkpoint(canonical, dtype))
            except RunFailure:
                raise
            except Exception as error:
                raise RunFailure(
                    f"the engine's loaders refuse {recorder.current}: {type(error).__name__}: {error}"
                ) from error
    return recorder.layout()


class _Recorder(TorchDispatchMode):
    """Sees what loaders do with stand-ins, and lets no write happen."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self.current = "anything"  # the tensor that was handed over last
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._sources: dict[int, tuple[str, Tensor]] = {}  # kept alive: a storage's address is its identity
        self._reached: set[str] = set()
        self._pieces: list[Piece] = []
        self._fills: list[tuple[str, Box]] = []
        for tensor in parameters.values():
            tensor.weight_loader = self._noting(tensor.weight_loader)  # type: ignore[attr-defined]

    def checkpoint(self, canonical: Mapping[str, Shape], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Canonical tensors without data, one after another."""
        for name, shape in canonical.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._sources[_storage(tensor)] = (name, tensor)
            self.current = name
            yield name, tensor

    def layout(self) -> Layout:
        """What was recorded; RunFailure for what is missing."""
        ignored = [name for name, _ in self._sources.values() if name not in self._reached]
        if ignored:
            raise RunFailure("the engine's loaders ignore tensors of the model: " + ", ".join(ignored[:20]))
        layout = Layout(
            {name: matrix_shape(tuple(tensor.shape)) for name, tensor in self._parameters.values()},
            merge_pieces(self._pieces),
            tuple(sorted(self._fills)),
        )
        faults = layout_faults(layout)
        if faults:
            raise RunFailure("the engine's loaders leave parameters unfilled:\n  " + "\n  ".join(faults[:20]))
        return layout

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in _FILLS and _storage(args[0]) in self._parameters:
            self._fill(args[0], 0 if func is torch.ops.aten.zero_.default else args[1])
            return args[0]
        source = next((a for a in args if isinstance(a, Tensor) and _storage(a) in self._sources), None)
        written = next((a for a in _written(func, args, kwargs) if self._known(a)), None)
        if written is not None:
            raise RunFailure(f"{self._name(written)}: {func} writes to it, which is not a copy of a box")
        if source is not None and func in _COPIES:
            # A copy or a cast has the same elements, and where they are is all that counts here.
            return source.view(source.shape)
        if source is None or func.is_view:
            return func(*args, **kwargs)
        raise RunFailure(f"{self._name(source)}: {func} computes with it; only its boxes can be sent")
