"""Sees where the loaders of a model put tensors without data.

A dispatch mode gets every tensor operation. Views pass; a write to a parameter is noted, not carried out: offset,
sizes and strides of both sides say which box goes where. Anything else that touches a tensor is no layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from grpo_mlm.errors import RunFailure
from grpo_mlm.layouts.boxes import Box, Layout, Piece, matrix_shape
from grpo_mlm.layouts.coverage import layout_faults
from grpo_mlm.layouts.merge import merge_pieces
from grpo_mlm.layouts.strided import strided_box

Shape = tuple[int, ...]

_FILLS = (torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor)
_SAME_ELEMENTS = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


class Recording(TorchDispatchMode):
    """`parameters` by name, and canonical tensors of `dtype`, which `checkpoint` makes; none of them has data."""

    def __init__(
        self, parameters: Mapping[str, Tensor], canonical: Mapping[str, Shape], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.current = "the first tensor"  # the one that the loaders were handed last
        self._canonical, self._dtype = canonical, dtype
        # By storage; the tensors are kept, because a storage's identity is its address.
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._sources: dict[int, tuple[str, Tensor]] = {}
        self._reached: set[str] = set()  # canonical tensors that came as far as a parameter's loader
        self._pieces: list[Piece] = []
        self._fills: list[tuple[str, Box]] = []
        for tensor in parameters.values():
            self._note_calls(tensor)

    def checkpoint(self) -> Iterator[tuple[str, Tensor]]:
        """The canonical tensors, without data."""
        for name, shape in self._canonical.items():
            tensor = torch.empty(shape, dtype=self._dtype, device="meta")
            self._sources[_storage(tensor)] = (name, tensor)
            self.current = name
            yield name, tensor

    def layout(self) -> Layout:
        """All that was seen, as a layout."""
        ignored = [name for name in self._canonical if name not in self._reached]
        if ignored:
            raise RunFailure("the engine's loaders ignore: " + ", ".join(ignored[:20]))
        shapes = {name: matrix_shape(tuple(tensor.shape)) for name, tensor in self._parameters.values()}
        layout = Layout(shapes, merge_pieces(self._pieces), tuple(sorted(self._fills)))
        faults = layout_faults(layout)
        if faults:
            raise RunFailure("the engine's loaders leave gaps:\n  " + "\n  ".join(faults[:20]))
        return layout

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        known = [tensor for tensor in tensors if self._name(tensor)]
        if not known or func.is_view:
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            self._copy(tensors[0], tensors[1])
            return tensors[0]
        if func in _FILLS:
            self._fill(tensors[0], 0 if len(args) == 1 else args[1])
            return tensors[0]
        if func in _SAME_ELEMENTS and _storage(tensors[0]) in self._sources:
            return torch.ops.aten.alias.default(tensors[0])  # a cast changes values, not places
        names = " and ".join(dict.fromkeys(map(self._name, known)))
        raise RunFailure(f"{names}: the engine's loaders call {func}; only boxes can be copied")

    def _copy(self, to: Tensor, source: Tensor) -> None:
        names = f"{self._name(source) or 'a computed tensor'} into {self._name(to) or 'no parameter'}"
        if _storage(to) not in self._parameters or _storage(source) not in self._sources:
            raise RunFailure(f"{names}: the engine's loaders copy what is not a box of a stored tensor")
        local, parameter = self._parameters[_storage(to)]
        tensor, whole = self._sources[_storage(source)]
        self._reached.add(tensor)
        if not to.numel():
            return
        box, place = _box(whole, source), _box(parameter, to)
        if box is None or place is None or _extents(box) != _extents(place):
            raise RunFailure(
                f"{names}: not a box in the same order on both sides ({_view(source)} -> {_view(to)})"
            )
        self._pieces.append(Piece(tensor, box, local, tuple(start for start, _ in place)))

    def _fill(self, to: Tensor, value: Any) -> None:
        local, parameter = self._parameters.get(_storage(to), ("", to))
        if not local or isinstance(value, Tensor) or value != 0:
            raise RunFailure(
                f"{self._name(to)}: the engine's loaders fill it with {value}; padding must be zero"
            )
        if not to.numel():
            return
        place = _box(parameter, to)
        if place is None:
            raise RunFailure(f"{local}: what is filled is not a box ({_view(to)})")
        self._fills.append((local, place))

    def _name(self, tensor: Tensor) -> str:
        """Of the parameter or the canonical tensor of which it is a view; empty for any other."""
        storage = _storage(tensor)
        return (self._parameters.get(storage) or self._sources.get(storage) or ("",))[0]

    def _note_calls(self, parameter: Any) -> None:
        """A tensor that reaches a loader is not ignored, though this rank may need nothing of it."""
        loader: Callable[..., Any] = parameter.weight_loader
        if loader is default_weight_loader:  # models compare with it; it always copies
            return

        @wraps(loader)
        def noting(*args: Any, **kwargs: Any) -> Any:
            tensors = (arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor))
            self._reached.update(
                self._sources[_storage(tensor)][0] for tensor in tensors if _storage(tensor) in self._sources
            )
            return loader(*args, **kwargs)

        parameter.weight_loader = noting


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _box(whole: Tensor, view: Tensor) -> Box | None:
    """The box of `whole`, seen as a matrix, that a view of it shows."""
    if not whole.is_contiguous() or view.dtype != whole.dtype:
        return None
    offset = int(view.storage_offset() - whole.storage_offset())
    return strided_box(matrix_shape(tuple(whole.shape)), offset, view.shape, view.stride())


def _extents(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def _view(tensor: Tensor) -> str:
    """As messages describe a view."""
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
