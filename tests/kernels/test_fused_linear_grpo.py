"""Loss and gradients of one pass over the logits, against autograd in float64 through all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_mlm.kernels import blocked, planner
from grpo_mlm.kernels.backends import Backend
from grpo_mlm.kernels.fused_linear_grpo import LossFn, fused_linear_grpo
from grpo_mlm.kernels.planner import Chunks, plan_chunks
from tests.kernels.reference import reference
from tests.kernels.test_linear_logprobs import BIG, problem, relative

ROWS, VOCAB = 33, 301
A_ROW = 4 * 384  # bytes of a row of logits, padding included
fused_loss = partial(fused_linear_grpo, entropy_grad=True)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of columns end inside of the vocabulary here too, and the budgets of these tests are for logits alone: of
    as few rows as they hold, or of tiles."""
    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(planner, "_BLOCK_BYTES", 0)
    monkeypatch.setattr(planner, "_FEWEST_ROWS", {"cpu": 1})


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chunk of rows is high enough."""
    monkeypatch.setattr(planner, "_FEWEST_ROWS", {"cpu": 1 << 30})


def linear_loss(by_logprob: Tensor, by_entropy: Tensor | None) -> LossFn:
    """A loss whose gradients by log-prob and entropy are these numbers."""

    def loss_fn(logprobs: Tensor, entropy: Tensor, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = by_logprob[rows] * logprobs
        if by_entropy is not None:
            value = value + by_entropy[rows] * entropy
        return value, {"row": rows, "logprob": logprobs}

    return loss_fn


def slopes() -> tuple[Tensor, Tensor]:
    """Gradients of all sizes; rows 4..9 and the last have none at all, row 12 has one by the entropy only."""
    by_logprob, by_entropy = torch.linspace(-1, 2, ROWS), torch.linspace(0.5, -1, ROWS)
    for rows in (slice(4, 10), slice(32, 33)):
        by_logprob[rows] = by_entropy[rows] = 0
    by_logprob[12] = 0
    return by_logprob, by_entropy


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("chunk_bytes", [BIG, 7 * A_ROW, A_ROW], ids=["one_chunk", "ragged_chunks", "rows"])
@pytest.mark.parametrize("entropy_term", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_values_and_gradients_equal_float64(
    temperature: float, chunk_bytes: int, entropy_term: bool, dtype: torch.dtype, tolerance: float
) -> None:
    h, w, targets = problem(dtype=dtype)
    by_logprob, by_entropy = slopes()
    if dtype == torch.bfloat16:
        chunk_bytes *= 2  # its products keep half of a small budget
    fn = linear_loss(by_logprob, by_entropy if entropy_term else None)
    fused = fused_loss(h, w, targets, fn, temperature, VOCAB, chunk_bytes)
    fused.loss.backward()
    used = by_entropy if entropy_term else torch.zeros(ROWS)
    logp, entropy, r_h, r_w = reference(h, w, targets, temperature, VOCAB, by_logprob, used)
    torch.testing.assert_close(fused.logprobs.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(fused.entropy.double(), entropy, rtol=0, atol=1e-5)
    assert fused.loss.item() == pytest.approx(
        (by_logprob @ logp.float() + used @ entropy.float()).item(), rel=1e-5
    )
    assert h.grad is not None
    assert w.grad is not None
    assert h.grad.dtype == w.grad.dtype == dtype
    assert relative(h.grad, r_h) < tolerance
    assert relative(w.grad, r_w) < tolerance
    assert (w.grad[VOCAB:] == 0).all()
    assert (h.grad[4:10] == 0).all()
    assert fused.report["row"].tolist() == list(range(ROWS))
    assert torch.equal(fused.report["logprob"], fused.logprobs)


def test_the_reference_backend_takes_float64_and_agrees() -> None:
    h, w, targets = problem(dtype=torch.float64)
    by_logprob, by_entropy = (x.double() for x in slopes())
    fused = fused_loss(
        h, w, targets, linear_loss(by_logprob, by_entropy), 0.7, VOCAB, BIG, backend="reference"
    )
    fused.loss.backward()
    logp, entropy, r_h, r_w = reference(h, w, targets, 0.7, VOCAB, by_logprob, by_entropy)
    for got, expected in ((fused.logprobs, logp), (fused.entropy, entropy), (h.grad, r_h), (w.grad, r_w)):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_skipping_rows_leaves_the_gradients_as_they_are() -> None:
    """Against the same pass in which every row counts as live: the sums have the same terms, but for zeros."""
    by_logprob, by_entropy = slopes()

    def gradients(find: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        h, w, targets = problem()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "nonzero", find)
            loss = fused_loss(h, w, targets, linear_loss(by_logprob, by_entropy), 0.7, VOCAB, BIG).loss
        loss.backward()
        assert h.grad is not None
        assert w.grad is not None
        return h.grad, w.grad

    real = Tensor.nonzero
    skipped, all_rows = gradients(real), gradients(lambda mask: real(torch.ones_like(mask)))
    for a, b in zip(skipped, all_rows, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    live = by_logprob.abs() + by_entropy.abs() > 0
    assert torch.equal(skipped[0][~live], all_rows[0][~live])


def test_only_rows_with_a_gradient_enter_the_backward_products() -> None:
    class Products(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[int] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.addmm_.default:  # into += tile @ weight, into += tile.T @ hidden
                self.rows.append(min(args[1].shape))
            return func(*args, **(kwargs or {}))

    h, w, targets = problem()
    by_logprob = torch.zeros(ROWS)
    by_logprob[[3, 20, 21]] = 1.0
    with Products() as seen:
        fused_loss(h, w, targets, linear_loss(by_logprob, None), 1.0, VOCAB, BIG)
    assert seen.rows == [3, 3]
    with Products() as seen:
        fused_loss(h, w, targets, linear_loss(torch.zeros(ROWS), None), 1.0, VOCAB, BIG)
    assert seen.rows == []


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_the_weights_gradient_is_added_to_the_main_gradient(backend: Backend) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        h, w, targets = problem(dtype=dtype)
        by_logprob, _ = slopes()
        main_grad = torch.full(w.shape, 0.25)
        fn = linear_loss(by_logprob, None)
        fused_loss(h, w, targets, fn, 0.7, VOCAB, BIG, None, backend, main_grad=main_grad).loss.backward()
        *_, r_h, r_w = reference(h, w, targets, 0.7, VOCAB, by_logprob, torch.zeros(ROWS))
        assert w.grad is None
        assert relative(main_grad - 0.25, r_w) < (1e-5 if dtype == torch.float32 else 6e-3)
        assert h.grad is not None
        assert relative(h.grad, r_h) < (2e-6 if dtype == torch.float32 else 6e-3)


def test_a_scaled_loss_has_scaled_gradients_and_cannot_go_into_the_main_gradient() -> None:
    h, w, targets = problem()
    fn = linear_loss(slopes()[0], None)
    (3 * fused_loss(h, w, targets, fn, 0.7, VOCAB, BIG).loss).backward()
    scaled = h.grad, w.grad
    h.grad = w.grad = None
    fused_loss(h, w, targets, fn, 0.7, VOCAB, BIG).loss.backward()
    for three, one in zip(scaled, (h.grad, w.grad), strict=True):
        assert three is not None
        assert one is not None
        torch.testing.assert_close(three, 3 * one)
    with pytest.raises(RuntimeError, match="unscaled loss"):
        (3 * fused_loss(h, w, targets, fn, 0.7, VOCAB, BIG, main_grad=torch.zeros_like(w)).loss).backward()


@pytest.mark.parametrize("entropy_term", [True, False])
@pytest.mark.parametrize("offset", [-30000.0, 30000.0, -300.0, 300.0])
def test_logits_far_from_zero(offset: float, entropy_term: bool) -> None:
    """Values lose nothing, gradients what rounding a logit to fp32 costs."""
    h = torch.ones(2, 2).requires_grad_()
    w = torch.tensor([[offset, 2.0], [offset, 1.0], [offset, 0.0]]).requires_grad_()
    by_entropy = torch.tensor([1.0, -2.0]) if entropy_term else torch.zeros(2)
    targets = torch.tensor([0, 2])
    fused = fused_loss(h, w, targets, linear_loss(torch.ones(2), by_entropy), 1.0, 3, BIG)
    fused.loss.backward()
    *_, r_w = reference(h, w, targets, 1.0, 3, torch.ones(2), by_entropy)
    expected = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64).log_softmax(0)
    torch.testing.assert_close(fused.logprobs.double(), expected[[0, 2]], rtol=0, atol=1e-6)
    torch.testing.assert_close(
        fused.entropy.double(), -(expected.exp() @ expected).expand(2), rtol=0, atol=1e-6
    )
    rounding = abs(offset) * torch.finfo(torch.float32).eps
    assert w.grad is not None
    torch.testing.assert_close(w.grad.double(), r_w, rtol=0, atol=1e-6 + 4 * rounding)


def test_log_probs_200_apart_stay_finite_and_exact() -> None:
    """A target that is 200 below the peak, one that holds all the mass, and a flat row."""
    h = torch.eye(3).requires_grad_()
    w = torch.tensor([[200.0, 200.0, 0.0], [0.0, 0.0, 0.0], [-1.0, 5.0, 0.0]]).requires_grad_()
    targets, slopes = (
        torch.tensor([1, 0, 2]),
        (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.5, -1.0, 2.0])),
    )
    fused = fused_loss(h, w, targets, linear_loss(*slopes), 1.0, 3, BIG)
    fused.loss.backward()
    logp, entropy, r_h, r_w = reference(h, w, targets, 1.0, 3, *slopes)
    for got, expected in ((fused.logprobs, logp), (fused.entropy, entropy), (h.grad, r_h), (w.grad, r_w)):
        assert got is not None
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_no_rows_and_one_row() -> None:
    """NUM-02. A micro-batch without response tokens still takes part in the backward pass."""
    h, w, targets = problem(rows=2)
    fn = linear_loss(torch.ones(2), None)
    fused_loss(h[:0], w, targets[:0], fn, 1.0, VOCAB, BIG).loss.backward()
    assert w.grad is not None
    assert (w.grad == 0).all()
    fused = fused_loss(h[:1], w, targets[:1], fn, 1.0, VOCAB, BIG)
    assert fused.logprobs.shape == (1,)


def test_a_tied_matrix_gets_both_gradients() -> None:
    """The embedding's own gradient adds to the head's."""
    _, w, targets = problem()
    ids = torch.arange(ROWS) % VOCAB
    loss = fused_loss(w[ids], w, targets, linear_loss(torch.ones(ROWS), None), 1.0, VOCAB, BIG).loss
    loss.backward()
    v = w.detach().double().requires_grad_()
    logp = torch.log_softmax(v[ids] @ v[:VOCAB].T, dim=1).gather(1, targets[:, None]).sum()
    logp.backward()
    assert w.grad is not None
    assert v.grad is not None
    assert relative(w.grad, v.grad) < 2e-6


@pytest.mark.parametrize("chunk_bytes", [BIG, 5 * A_ROW])
def test_the_same_bits_every_time(chunk_bytes: int) -> None:
    results = []
    for _ in range(2):
        h, w, targets = problem()
        fused = fused_loss(h, w, targets, linear_loss(*slopes()), 0.9, VOCAB, chunk_bytes)
        fused.loss.backward()
        results.append((fused.loss.detach(), fused.logprobs, fused.entropy, h.grad, w.grad))
    for a, b in itertools.pairwise(results):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Storages(TorchDispatchMode):
    """Bytes of each storage that an operation gave back; those that it was given left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.sizes.append(x.untyped_storage().nbytes())
        return out


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_bytes", [7 * A_ROW, 2 * A_ROW], ids=["ragged_tiles", "columns"])
@pytest.mark.parametrize("entropy_term", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_tiles_have_the_same_values_and_gradients(
    temperature: float, chunk_bytes: int, entropy_term: bool, dtype: torch.dtype, tolerance: float
) -> None:
    h, w, targets = problem(dtype=dtype)
    by_logprob, by_entropy = slopes()
    by_entropy = by_entropy if entropy_term else torch.zeros(ROWS)
    main_grad = torch.full(w.shape, 0.25)
    fn = linear_loss(by_logprob, by_entropy)
    with Storages() as seen:
        fused = fused_loss(h, w, targets, fn, temperature, VOCAB, chunk_bytes, main_grad=main_grad)
    fused.loss.backward()
    assert max(seen.sizes) <= max(chunk_bytes // 3, 4 * w.numel() // 3)
    logp, entropy, r_h, r_w = reference(h, w, targets, temperature, VOCAB, by_logprob, by_entropy)
    torch.testing.assert_close(fused.logprobs.double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(fused.entropy.double(), entropy, rtol=0, atol=1e-5)
    assert h.grad is not None
    assert relative(h.grad, r_h) < tolerance
    assert relative(main_grad - 0.25, r_w) < max(tolerance, 1e-5)
    assert fused.report["row"].tolist() == list(range(ROWS))


@pytest.mark.parametrize("rows", [64, 256])
def test_the_workspace_is_the_budget_whatever_the_number_of_rows(rows: int) -> None:
    """No tensor of rows by vocabulary: but for the gradients, nothing is larger than a chunk of 8 rows of logits."""
    vocab, hidden = 2048, 4
    h, w, targets = problem(rows, hidden, vocab, vocab)
    main_grad = torch.zeros_like(w)
    with Storages() as seen:
        fn = linear_loss(torch.ones(rows), None)
        fused_loss(h, w, targets, fn, 1.0, vocab, 8 * 4 * vocab, main_grad=main_grad).loss.backward()
    assert max(seen.sizes) == 8 * 4 * vocab


def test_the_weights_gradient_exists_once() -> None:
    """Autograd copies what somebody else still holds."""
    h, w, targets = problem(64, 4, 2048, 2048)
    with Storages() as seen:
        fused_loss(h, w, targets, linear_loss(torch.ones(64), None), 1.0, 2048, 4 * 2048).loss.backward()
    assert seen.sizes.count(w.nbytes) == 1
    assert max(seen.sizes) == w.nbytes


def test_gradients_are_handed_out_once() -> None:
    h, w, targets = problem()
    loss = fused_loss(h, w, targets, linear_loss(torch.ones(ROWS), None), 1.0, VOCAB, BIG).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out once"):
        loss.backward()


def test_entropies_are_constants_without_their_gradient() -> None:
    results = []
    by_logprob, by_entropy = slopes()
    for backend in ("chunked", "reference"):
        h, w, targets = problem()
        fn = linear_loss(by_logprob, by_entropy)
        fused_linear_grpo(
            h, w, targets, fn, 0.7, VOCAB, BIG, None, backend, entropy_grad=False
        ).loss.backward()
        *_, r_h, r_w = reference(h, w, targets, 0.7, VOCAB, by_logprob, torch.zeros(ROWS))
        assert h.grad is not None
        assert w.grad is not None
        results += [relative(h.grad, r_h), relative(w.grad, r_w)]
    assert max(results) < 2e-6


@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_a_frozen_matrix_gets_no_gradient(backend: Backend) -> None:
    h, w, targets = problem()
    fn = linear_loss(slopes()[0], None)
    fused_loss(h, w.detach(), targets, fn, 0.7, VOCAB, BIG, None, backend).loss.backward()
    *_, r_h, _ = reference(h, w, targets, 0.7, VOCAB, slopes()[0], torch.zeros(ROWS))
    assert h.grad is not None
    assert relative(h.grad, r_h) < 2e-6


def test_a_budget_below_one_row_is_refused() -> None:
    h, w, targets = problem()
    with pytest.raises(
        ValueError, match=r"actor.logits_chunk_mb: 1535 bytes are too few for one row .* 384 columns"
    ):
        fused_loss(h, w, targets, linear_loss(torch.ones(ROWS), None), 1.0, VOCAB, A_ROW - 1)


@pytest.mark.parametrize("target", [-1, 301, 383, 10_000])
def test_targets_outside_the_vocabulary_are_refused(target: int) -> None:
    h, w, targets = problem()
    targets[5] = target
    with pytest.raises(RuntimeError, match="vocabulary of 301"):
        fused_loss(h, w, targets, linear_loss(torch.ones(ROWS), None), 1.0, VOCAB, BIG)


def test_what_no_backend_can_do_is_refused() -> None:
    h, w, targets = problem()
    fn = linear_loss(torch.ones(ROWS), None)
    with pytest.raises(ValueError, match="float64, expected float32 or bfloat16"):
        fused_loss(h.double(), w.double(), targets, fn, 1.0, VOCAB, BIG)


@pytest.mark.parametrize(
    ("rows", "budget_rows", "cuts"),
    [
        (10, 10, [(0, 10)]),
        (10, 9, [(0, 5), (5, 10)]),
        (7, 3, [(0, 2), (2, 4), (4, 7)]),
        (0, 5, [(0, 0)]),
    ],
)
@pytest.mark.parametrize("more", [0, 399])
def test_chunks_are_few_and_equal(
    rows: int, budget_rows: int, cuts: list[tuple[int, int]], more: int
) -> None:
    plan = plan_chunks(rows, 16, 100, torch.float32, budget_rows * 400 + more, torch.device("cpu"))
    assert plan.cut(rows) == cuts
    assert plan.mode == ("whole" if len(cuts) == 1 else "rows")


def test_the_plan_leaves_room_for_what_is_beside_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, mib = torch.device("cpu"), torch.device("cuda"), 1 << 20
    monkeypatch.undo()  # the real blocks
    # 151936 columns of fp32 are 0.5796 MiB a row. 4 MiB of blocks on the CPU: 74 / 0.5796 = 127 rows.
    assert plan_chunks(1024, 512, 151936, torch.float32, 78 * mib, cpu) == Chunks("rows", 127, 151936)
    assert plan_chunks(8192, 512, 151936, torch.float32, 1024 * mib, cuda) == Chunks("rows", 1766, 151936)
    # bf16: 256 MiB for two fp32 [8192, 4096], then 768 / 0.5796 = 1325 rows.
    assert plan_chunks(8192, 4096, 151936, torch.bfloat16, 1024 * mib, cuda) == Chunks("rows", 1325, 8192)
    # A rank of eight at 8192 rows: 0.58 GiB of logits at once.
    assert plan_chunks(8192, 4096, 18992, torch.float32, 1024 * mib, cuda).mode == "whole"


def test_where_chunks_would_be_low_there_are_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda, mib = torch.device("cpu"), torch.device("cuda"), 1 << 20
    monkeypatch.undo()
    # 41 MiB are 63 rows and blocks, 42 are 65. Tiles of 1024 columns, or three [8192, 2730] in 256 MiB.
    assert plan_chunks(1024, 512, 151936, torch.float32, 41 * mib, cpu) == Chunks("columns", 1024, 1024)
    assert plan_chunks(1024, 512, 151936, torch.float32, 42 * mib, cpu).mode == "rows"
    assert plan_chunks(8192, 512, 151936, torch.float32, 256 * mib, cuda) == Chunks("columns", 8192, 2730)
    assert plan_chunks(30, 512, 151936, torch.float32, 25 * mib, cpu).mode == "whole"
