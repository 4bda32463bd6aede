"""The CPU's own layers against float64 arithmetic by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_mlm.engine.cpu import causal
from grpo_mlm.engine.cpu import norm as norm_module
from grpo_mlm.engine.cpu.norm import RMSNorm
from grpo_mlm.engine.cpu.rotary import rotary_table, rotate
from grpo_mlm.engine.cpu.segments import from_padded, packed_segments, to_padded
from grpo_mlm.engine.cpu.swiglu import SwiGLU

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_function(
    ours: Callable[..., Tensor], exact: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype
) -> None:
    """Values and gradients of every input."""
    mine = [x.to(dtype).requires_grad_() for x in inputs]
    double = [x.detach().double().requires_grad_() for x in mine]
    out, expected = ours(*mine), exact(*double)
    upstream = rand(*out.shape, seed=9).to(dtype)
    out.backward(upstream)
    expected.backward(upstream.double())
    assert out.dtype == dtype
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(mine, double, strict=True))]
    for actual, wanted in pairs:
        scale = wanted.abs().max().item()
        torch.testing.assert_close(actual.double(), wanted, rtol=0, atol=ROUNDING[dtype] * scale)


def naive_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key[:, None].mT / math.sqrt(query.shape[-1])
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(ahead, -math.inf).softmax(-1) @ value[:, None]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("queries", "scores"), [(256, 1 << 22), (3, 1 << 22), (4, 150)])
def test_causal_attention(
    queries: int, scores: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, in blocks of queries, and in blocks of groups as well."""
    monkeypatch.setattr(causal, "QUERIES", queries)
    monkeypatch.setattr(causal, "SCORES", scores)
    inputs = [rand(5, 3, 11, 8, seed=1), rand(5, 11, 8, seed=2), rand(5, 11, 8, seed=3)]
    assert_same_function(causal.causal_attention, naive_attention, inputs, dtype)


def test_blocks_keep_scores_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal, "SCORES", 1000)
    for _, block, seen in causal._blocks(torch.Size((7, 2, 300, 8))):
        assert block.stop - block.start <= causal.QUERIES
        assert seen == slice(0, block.stop)
    sizes = [n.stop - n.start for n, *_ in causal._blocks(torch.Size((7, 2, 10, 8)))]
    assert max(sizes) * 2 * 10 * 10 <= 1000
    assert sum(sizes) == 7


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("block", [1 << 18, 40])
def test_rms_norm(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_module, "BLOCK", block)
    layer = RMSNorm(
        SimpleNamespace(sequence_parallel=False, layernorm_zero_centered_gamma=False, params_dtype=dtype),
        16,
        eps=1e-2,
    )

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (16,), weight, 1e-2)

    assert_same_function(ours, exact, [rand(7, 2, 16, seed=1), 1 + rand(16, seed=2)], dtype)


def test_rms_norm_leaves_its_input_alone() -> None:
    layer = RMSNorm(
        SimpleNamespace(
            sequence_parallel=False, layernorm_zero_centered_gamma=False, params_dtype=torch.float32
        ),
        16,
    )
    x = rand(5, 16)
    before = x.clone()
    layer(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_swiglu(dtype: torch.dtype) -> None:
    def exact(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up

    assert_same_function(SwiGLU(None), exact, [rand(6, 1, 20)], dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rotary(dtype: torch.dtype) -> None:
    """A pair of channels (i, i + d/2) turns by position times frequency i."""
    positions, frequencies = torch.tensor([0, 1, 5, 200, 3]), torch.tensor([1.0, 0.1, 0.01])
    cos, sin = rotary_table(positions, frequencies, dtype)

    def exact(x: Tensor) -> Tensor:
        angle = (positions[:, None] * frequencies.double())[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    assert_same_function(lambda x: rotate(x, cos, sin), exact, [rand(5, 2, 6)], dtype)


def segments_of(lengths: list[int]) -> Any:
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return packed_segments(cu, torch.zeros(sum(lengths)), torch.ones(1), torch.float32)


@pytest.mark.parametrize("lengths", [[5], [3, 3, 3], [2, 9, 1, 10, 8, 2], [4, 0, 4]])
def test_segments_there_and_back(lengths: list[int]) -> None:
    """Every segment is one row of a padded batch, in order, little longer than itself; and comes back."""
    segments, heads = segments_of(lengths), 3
    rows = segments.rows(heads)
    tokens = torch.arange(float(sum(lengths)))[:, None, None].expand(-1, heads, 2)
    padded = to_padded(tokens, rows)
    size_at = {sum(lengths[:i]): n for i, n in enumerate(lengths) if n}
    starts, first = [], 0
    for n, length in segments.batches:
        last = first + n * length * heads
        for row in padded[first:last].view(n, heads, length, 2):
            start = int(row[0, 0, 0])
            size = size_at[start]
            assert torch.equal(row[:, :size], tokens[start : start + size].transpose(0, 1))
            assert length <= 1.25 * size
            starts.append(start)
        first = last
    assert sorted(starts) == sorted(size_at)
    assert torch.equal(from_padded(padded, rows).view_as(tokens), tokens)


def test_gradients_pass_through_padding() -> None:
    """There and back is the identity, so is its gradient; padding contributes nothing."""
    segments = segments_of([2, 9, 1, 10, 8])
    x = rand(30, 2, 4).requires_grad_()
    rows = segments.rows(2)
    upstream = rand(60, 4, seed=4)
    from_padded(to_padded(x, rows) * 3, rows).backward(upstream)
    torch.testing.assert_close(x.grad, 3 * upstream.view_as(x))
