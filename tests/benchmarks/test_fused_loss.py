"""The variants that the loss benchmark compares do the same, and its arithmetic is that of a calculator."""

from __future__ import annotations

import json

import pytest
from torch import Tensor

from benchmarks.loss_problem import Problem, make_problem
from benchmarks.loss_variants import SKIPPING, VARIANTS, liger_is_there, naive, variant
from benchmarks.roofline import roofline
from benchmarks.run import main
from benchmarks.workspace import workspace
from grpo_mlm.errors import UserError


def gradients(problem: Problem, name: str) -> tuple[Tensor, Tensor]:
    problem.hidden.grad = problem.weight.grad = None
    variant(name)(problem)
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    return problem.hidden.grad, problem.weight.grad


@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in ("naive autograd", "three products")])
def test_every_variant_has_the_gradients_of_autograd(name: str) -> None:
    if name == "Liger chunked" and not liger_is_there():
        pytest.skip("liger_kernel is not installed")
    problem = make_problem(64, 16, 2000)
    for got, expected in zip(gradients(problem, name), gradients(problem, "naive autograd"), strict=True):
        assert (got - expected).norm() < 2e-6 * expected.norm()


def test_the_skipping_case_is_what_its_name_says() -> None:
    problem = make_problem(200, 16, 2000, skipping=True)
    assert len(problem.kept) == 128
    naive(problem)
    assert problem.hidden.grad is not None
    assert int((problem.hidden.grad != 0).any(1).sum()) == 80
    for got, expected in zip(gradients(problem, SKIPPING), gradients(problem, "naive autograd"), strict=True):
        assert (got - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.slow
def test_workspace_is_measured_in_a_process_of_its_own() -> None:
    """128 rows of logits, and twice that: the peak must show both, and no gradient."""
    bytes_of_logits = 128 * 32768 * 4
    one, two = (workspace("three products", rows, 16, 32768) for rows in (128, 64))
    if one is None or two is None:
        pytest.skip("no /proc/self/clear_refs")
    assert one == pytest.approx(bytes_of_logits, abs=2 << 20)
    assert two == pytest.approx(bytes_of_logits / 2, abs=2 << 20)


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(UserError, match="no variant 'fast' of the loss; there are naive autograd"):
        variant("fast")


def test_roofline_of_one_size() -> None:
    """H=4096 on one H100: 3 x 2 x 8192 x 4096 x 151936 = 30.588e12 FLOPs at 989.5e12 a second are 30.91 ms.

    1.2447e9 logits at 18 bytes are 22.404e9, in 5 chunks (of 1280 MiB, 320 are for products, the rest holds 1656
    rows) 4 x 8 x 4096 x 151936 = 19.915e9 more: 42.319e9 at 3.35e12 a second are 12.632 ms.
    """
    row = next(r for r in roofline().rows if (r["GPU"], r["H"], r["TP"]) == ("H100", 4096, 1))
    assert row["TFLOP"] == pytest.approx(30.588, rel=1e-4)
    assert row["bound ms"] == pytest.approx(30.913, rel=1e-4)
    assert row["chunks"] == 5
    assert row["GB moved"] == pytest.approx(22.404 + 19.915, rel=1e-4)
    assert row["single pass ms"] == pytest.approx(30.913 + 12.632, rel=1e-4)
    assert row["naive ms"] == pytest.approx(30.913 + 70 * 1.24466 / 3.35, rel=1e-4)
    assert row["recompute ms"] == pytest.approx(4 / 3 * 30.913 + 6 * 1.24466 / 3.35, rel=1e-4)


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["run", "fused_loss", "--roofline", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["benchmark"] == "fused_loss_roofline"
    assert [(r["H"], r["TP"], r["GPU"]) for r in printed["rows"]] == [
        (h, tp, gpu) for h in (4096, 5120, 8192) for tp in (1, 8) for gpu in ("H100", "H200")
    ]
