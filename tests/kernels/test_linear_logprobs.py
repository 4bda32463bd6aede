"""Log-probs and entropies from hidden states, one process, against torch's log_softmax in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_mlm.kernels.linear_logprobs import linear_logprobs
from grpo_mlm.kernels.matmul import matmul_fp32
from tests.kernels.reference import reference

BIG = 1 << 30


def problem(
    rows: int = 33, hidden: int = 24, vocab: int = 301, padded: int = 384, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, weights with padding rows that would win every softmax, targets with both ends among them."""
    make = torch.Generator().manual_seed(0)
    h = torch.randn(rows, hidden, generator=make).to(dtype).requires_grad_()
    w = (0.5 * torch.randn(padded, hidden, generator=make)).to(dtype)
    w[vocab:] = 50.0
    targets = torch.randint(0, vocab, (rows,), generator=make)
    targets[0], targets[1] = 0, vocab - 1
    return h, w.requires_grad_(), targets


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_bytes", [BIG, 33 * 3 * 4 * 7, 1], ids=["one_tile", "ragged_tiles", "columns"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_values_and_gradients_equal_float64(
    temperature: float, chunk_bytes: int, dtype: torch.dtype, tolerance: float
) -> None:
    """LOSS-03's fused against plain, fp32 and bf16. Values are fp32-exact from bf16 operands too."""
    h, w, targets = problem(dtype=dtype)
    up_logp, up_entropy = torch.linspace(-1, 2, 33), torch.linspace(0.5, -1, 33)
    logp, entropy = linear_logprobs(h, w, targets, temperature, 301, chunk_bytes)
    (logp @ up_logp + entropy @ up_entropy).backward()
    r_logp, r_entropy, r_h, r_w = reference(h, w, targets, temperature, 301, up_logp, up_entropy)
    assert logp.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logp.double(), r_logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), r_entropy, rtol=0, atol=1e-5)
    assert h.grad is not None
    assert w.grad is not None
    assert h.grad.dtype == w.grad.dtype == dtype
    assert relative(h.grad, r_h) < tolerance
    assert relative(w.grad, r_w) < tolerance
    assert (w.grad[301:] == 0).all()


@pytest.mark.parametrize("which", ["logprob", "entropy"])
def test_each_output_alone_is_differentiable(which: str) -> None:
    h, w, targets = problem()
    logp, entropy = linear_logprobs(h, w, targets, 0.8, 301, 5000)
    one, zero = torch.ones(33), torch.zeros(33)
    (logp if which == "logprob" else entropy).sum().backward()
    ups = (one, zero) if which == "logprob" else (zero, one)
    *_, r_h, r_w = reference(h, w, targets, 0.8, 301, *ups)
    assert h.grad is not None
    assert w.grad is not None
    assert relative(h.grad, r_h) < 2e-6
    assert relative(w.grad, r_w) < 2e-6


def test_temperature_scales_the_logits() -> None:
    """ROL-02. Logits 2, 1, 0: at temperature 0.5 the first has log-prob -.142932, at 1 -.407606."""
    h, w, target = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]]), torch.tensor([0])
    assert linear_logprobs(h, w, target, 0.5, 3, BIG)[0].item() == pytest.approx(-0.142932, abs=1e-6)
    assert linear_logprobs(h, w, target, 1.0, 3, BIG)[0].item() == pytest.approx(-0.407606, abs=1e-6)


def test_logits_of_bf16_operands_are_not_rounded_to_bf16() -> None:
    """NUM-03. 12.25 + 0.09 and 12.25 + 0.05 (as bf16 has them) against 5 and 1; in bf16 the first two are equal."""
    h = torch.ones(1, 2, dtype=torch.bfloat16)
    w = torch.tensor([[12.25, 0.09], [12.25, 0.05], [5.0, 0.0], [1.0, 0.0]], dtype=torch.bfloat16)
    logits = w.double().sum(1)
    logp = torch.stack([linear_logprobs(h, w, torch.tensor([i]), 1.0, 4, BIG)[0][0] for i in range(4)])
    torch.testing.assert_close(logp.double(), logits.log_softmax(0), rtol=0, atol=2e-6)
    assert logp[0].item() == pytest.approx(-0.673684, abs=1e-3)
    rounded = logits.bfloat16().double().log_softmax(0)
    assert rounded[0] == rounded[1]
    assert logp[0] - logp[1] > 0.03


@pytest.mark.parametrize("offset", [-30000.0, 30000.0])
def test_logits_far_from_zero_lose_nothing(offset: float) -> None:
    """All logits very negative is where a maximum that starts at 0 breaks; large ones overflow a plain exp."""
    h = torch.ones(1, 2)
    w = torch.tensor([[offset, 2.0], [offset, 1.0], [offset, 0.0]])
    expected = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).log_softmax(0)
    for chunk_bytes in (BIG, 1):
        logp, entropy = linear_logprobs(h, w, torch.tensor([0]), 1.0, 3, chunk_bytes)
        assert logp.item() == pytest.approx(expected[0].item(), abs=1e-6)
        assert entropy.item() == pytest.approx(-(expected.exp() * expected).sum().item(), abs=1e-6)


def test_no_rows_give_no_values_and_zero_gradients() -> None:
    """NUM-02. A micro-batch without response tokens still takes part in the backward pass."""
    h, w, targets = problem(rows=2)
    empty = h[:0]
    logp, entropy = linear_logprobs(empty, w, targets[:0], 1.0, 301, 4096)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert w.grad is not None
    assert (w.grad == 0).all()


@pytest.mark.parametrize("target", [-1, 301, 383, 10_000])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    h, w, targets = problem()
    targets[5] = target
    with pytest.raises(RuntimeError, match="vocabulary of 301"):
        linear_logprobs(h, w, targets, 1.0, 301, BIG)


def test_scoring_without_grad_gives_the_same_bits_as_training() -> None:
    """So that the ratio of the first update is 1."""
    for dtype in (torch.float32, torch.bfloat16):
        h, w, targets = problem(dtype=dtype)
        trained = linear_logprobs(h, w, targets, 0.9, 301, 4096)
        with torch.no_grad():
            scored = linear_logprobs(h, w, targets, 0.9, 301, 4096)
        assert torch.equal(trained[0], scored[0])
        assert torch.equal(trained[1], scored[1])
        assert not scored[0].requires_grad


def test_no_tensor_of_rows_by_vocabulary_is_made() -> None:
    """The largest tensor that any operation of both passes returns, in elements, is a tile or a gradient."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return out

    rows, hidden, vocab = 200, 4, 3000
    h, w, targets = problem(rows, hidden, vocab, vocab)
    budget = 3 * 4 * rows * 100
    with Watch():
        logp, entropy = linear_logprobs(h, w, targets, 1.0, vocab, budget)
        (logp.sum() + entropy.sum()).backward()
    assert largest <= max(rows * 100, vocab * hidden)


def test_bf16_products_keep_fp32_results_and_leave_the_switch_as_it_was() -> None:
    make = torch.Generator().manual_seed(1)
    a = torch.randn(64, 256, generator=make).bfloat16()
    b = torch.randn(256, 96, generator=make).bfloat16()
    before = torch.backends.mkldnn.matmul.fp32_precision
    product = matmul_fp32(a, b)
    exact = a.double() @ b.double()
    assert (product.double() - exact).abs().max() < 1e-4
    assert ((a @ b).double() - exact).abs().max() > 1e-2  # what a plain bf16 product loses
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    c, d = torch.randn(64, 256, generator=make), torch.randn(256, 96, generator=make)
    assert (matmul_fp32(c, d).double() - c.double() @ d.double()).abs().max() < 1e-4
