"""Layouts that cross process borders, and the arithmetic by which one is recorded: boxes of views, merged pieces."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from grpo_mlm.layouts.boxes import Layout, Piece, slices
from grpo_mlm.layouts.merge import merge_pieces
from grpo_mlm.layouts.packed import pack_layout, unpack_layout
from grpo_mlm.layouts.strided import strided_box

LAYOUT = Layout(
    shapes={"fused": (8, 3), "norm": (5,), "table": (4, 3)},
    pieces=(
        Piece("a.weight", ((2, 6), (0, 3)), "fused", (0, 0)),
        Piece("b.weight", ((0, 4), (3, 6)), "fused", (4, 0)),
        Piece("norm", ((0, 5),), "norm", (0,)),
        Piece("a.weight", ((6, 7), (0, 3)), "table", (0, 0)),
    ),
    fills=(("table", ((1, 4), (0, 3))),),
)


def test_a_packed_layout_comes_back_equal_through_json() -> None:
    packed = json.loads(json.dumps(pack_layout(LAYOUT)))
    assert packed["pieces"][1] == [1, 0, 0, 4, 3, 6, 4, 0]
    assert packed["tensors"] == ["a.weight", "b.weight", "norm"]
    assert unpack_layout(packed) == LAYOUT


def test_a_box_of_a_view_shows_the_same_elements() -> None:
    """Every box of a 4 x 6 matrix and of a vector of 5, sliced by torch, is found again."""
    for whole in (torch.arange(24).view(4, 6), torch.arange(5), torch.arange(4).view(4, 1)):
        spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in whole.shape]
        for box in itertools.product(*spans):
            view = whole[slices(box)]
            found = strided_box(whole.shape, view.storage_offset(), view.shape, view.stride())
            assert found == box


@pytest.mark.parametrize(
    "view",
    [
        lambda m: m.t(),
        lambda m: m[::2],
        lambda m: m[:, ::2],
        lambda m: m.view(-1)[4:9],
        lambda m: m[:1].expand(3, 6),
        lambda m: m.as_strided((2, 2), (6, 1), 5),
        lambda m: m.view(2, 2, 6)[:, :1, :3],
    ],
    ids=[
        "transposed",
        "every second row",
        "every second column",
        "over a row's end",
        "expanded",
        "wraps",
        "three",
    ],
)
def test_a_view_that_is_no_box_is_none(view: object) -> None:
    seen = view(torch.arange(24).view(4, 6))  # type: ignore[operator]
    assert strided_box((4, 6), seen.storage_offset(), seen.shape, seen.stride()) is None


def test_pieces_that_continue_each_other_become_one() -> None:
    def rows(start: int, stop: int, at: int, tensor: str = "t") -> Piece:
        return Piece(tensor, ((start, stop), (0, 3)), "x", (at, 0))

    assert merge_pieces([rows(4, 6, 4), rows(0, 2, 0), rows(2, 4, 2)]) == (rows(0, 6, 0),)
    # Apart in the canonical tensor, apart in the local one, or of different tensors.
    for apart in (
        [rows(0, 2, 0), rows(3, 4, 2)],
        [rows(0, 2, 0), rows(2, 4, 3)],
        [rows(0, 2, 0), rows(2, 4, 2, "u")],
    ):
        assert merge_pieces(apart) == tuple(apart)
    columns = [Piece("t", ((0, 4), (c, c + 2)), "x", (0, c - 2)) for c in (2, 4)]
    assert merge_pieces(columns) == (Piece("t", ((0, 4), (2, 6)), "x", (0, 0)),)
