"""Models whose loaders do what a layout cannot say, and a few things that it can."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

SHAPES = {"x.weight": (4, 4), "y.weight": (4,)}
Load = Callable[["Odd", Tensor, Tensor], None]


class Odd(nn.Module):
    """Parameters `layer.weight` and `layer.bias`, loaded from `x.weight` and `y.weight` as `load` says."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.register_buffer("scale", torch.ones(4))
        self.load = load

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.load(self, *dict(weights).values())


def plain(model: Odd, x: Tensor, y: Tensor) -> None:
    model.layer.weight.data.copy_(x)
    model.layer.bias.data.copy_(y)


def _with_weight(change: Callable[[Tensor, Tensor], object]) -> Load:
    """Loads the bias in the plain way and does something else to the weight."""

    def load(model: Odd, x: Tensor, y: Tensor) -> None:
        model.layer.bias.data.copy_(y)
        change(model.layer.weight.data, x)

    return load


def _ignoring(model: Odd, x: Tensor, y: Tensor) -> None:
    model.layer.weight.data.copy_(x)
    model.layer.bias.data.zero_()


def _into_a_buffer(model: Odd, x: Tensor, y: Tensor) -> None:
    plain(model, x, y)
    model.layer.scale.copy_(y)


def _refusing(model: Odd, x: Tensor, y: Tensor) -> None:
    raise ValueError("no module named y")


REFUSED: dict[str, tuple[Load, str]] = {
    "transposed": (_with_weight(lambda w, x: w.copy_(x.t())), r"x\.weight into layer\.weight: not a box"),
    "computed": (_with_weight(lambda w, x: w.copy_(x + 1)), r"x\.weight: .*aten\.add"),
    "changed afterwards": (_with_weight(lambda w, x: w.copy_(x).mul_(2)), r"layer\.weight: .*aten\.mul_"),
    "from nowhere": (
        _with_weight(lambda w, x: w.copy_(torch.ones(4, 4))),
        r"computed tensor into layer\.weight",
    ),
    "other bits": (_with_weight(lambda w, x: w.copy_(x.view(torch.int32))), r"x\.weight into layer\.weight"),
    "broadcast": (_with_weight(lambda w, x: w.copy_(x[:1])), r"x\.weight into layer\.weight: not a box"),
    "not zero": (_with_weight(lambda w, x: w.fill_(1)), r"layer\.weight: .*fill it with 1"),
    "twice": (_with_weight(lambda w, x: (w.copy_(x), w[:2].copy_(x[2:]))), r"layer\.weight: filled twice"),
    "half": (_with_weight(lambda w, x: w[:, 1:].copy_(x[:, 1:])), r"layer\.weight: 4 of 16 elements"),
    "ignored": (_ignoring, r"ignore: y\.weight"),
    "a buffer": (_into_a_buffer, r"y\.weight into no parameter"),
    "refused": (_refusing, r"y\.weight: .*no module named y"),
}
"""What loaders may not do, and what the error says of it."""


def cast_and_cut(model: Odd, x: Tensor, y: Tensor) -> None:
    """A plain cast, copies in between and separate rows, which a layout can say."""
    model.layer.weight.data[:2].copy_(x[2:].to(torch.bfloat16).contiguous())
    model.layer.weight.data[2:, :3].copy_(x.float()[:2, 1:])
    model.layer.weight[2:, 3:].data.fill_(0)
    model.layer.weight[4:].data.fill_(0)  # no rows
    model.layer.bias.data.copy_(y)
