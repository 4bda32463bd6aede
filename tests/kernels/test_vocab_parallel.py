"""Two processes, each with half of the vocabulary, against the whole one in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mlm.kernels.linear_logprobs import linear_logprobs
from tests.kernels.reference import reference

pytestmark = pytest.mark.slow

RANKS = 2
Results = list[dict[str, Tensor]]
# name -> (padded vocabulary, true vocabulary, dtype); in `all_padding` rank 1 has no true column at all.
SHAPES = {
    "even": (512, 512, torch.float32),
    "padded": (512, 301, torch.float32),
    "all_padding": (512, 70, torch.float32),
    "bf16": (512, 301, torch.bfloat16),
}


def problem(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    padded, vocab, dtype = SHAPES[name]
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 16, generator=make).to(dtype)
    weight = (0.7 * torch.randn(padded, 16, generator=make)).to(dtype)
    weight[vocab:] = 40.0
    targets = torch.randint(0, vocab, (40,), generator=make)
    edges = [t for t in (0, 255, 256, vocab - 1) if t < vocab]
    targets[: len(edges)] = torch.tensor(edges)
    return hidden, weight, targets, torch.randn(40, generator=make), torch.randn(40, generator=make)


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group = dist.new_group(list(range(RANKS)))
    assert group is not None
    out: dict[str, Tensor] = {}
    for name, (padded, vocab, _) in SHAPES.items():
        hidden, weight, targets, up_logp, up_entropy = problem(name)
        h = hidden.clone().requires_grad_()
        w = weight.chunk(RANKS)[rank].clone().requires_grad_()
        logp, entropy = linear_logprobs(h, w, targets, 0.7, vocab, padded * 40, group)
        (logp @ up_logp + entropy @ up_entropy).backward()
        assert h.grad is not None
        assert w.grad is not None
        for key, value in {"logp": logp, "entropy": entropy, "h": h.grad, "w": w.grad}.items():
            out[f"{name}/{key}"] = value.detach()
    # Logits 0, 1, 2, 3 of target 1: an identity for hidden states makes the weight the logits.
    h = torch.ones(1, 1)
    w = torch.tensor([[0.0], [1.0], [2.0], [3.0]]).chunk(RANKS)[rank].clone().requires_grad_()
    logp, _ = linear_logprobs(h, w, torch.tensor([1]), 1.0, 4, 1 << 20, group)
    logp.sum().backward()
    assert w.grad is not None
    out |= {"small/logp": logp.detach(), "small/w": w.grad[:, 0].contiguous()}
    save_file(out, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("tp2")
    mp.spawn(one_rank, args=(folder,), nprocs=RANKS)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(RANKS)]


def test_log_prob_and_its_gradient_on_both_ranks(results: Results) -> None:
    """LOSS-03. Zeros on rank 1, or a log-prob that is off by ln 2, are the faulty answers."""
    for result in results:
        torch.testing.assert_close(result["small/logp"], torch.tensor([-2.440190]), rtol=0, atol=1e-6)
    gradients = torch.cat([result["small/w"] for result in results])
    expected = torch.tensor([-0.032059, 0.912856, -0.236883, -0.643914])
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(SHAPES))
def test_values_and_gradients_equal_one_process_in_float64(results: Results, name: str) -> None:
    """LOSS-03. With targets at the edges of the shards, padding rows that would win, and a shard of padding."""
    _, vocab, dtype = SHAPES[name]
    hidden, weight, targets, *ups = problem(name)
    logp, entropy, grad_hidden, grad_weight = reference(hidden, weight, targets, 0.7, vocab, *ups)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    for result in results:
        torch.testing.assert_close(result[f"{name}/logp"].double(), logp, rtol=0, atol=2e-5)
        torch.testing.assert_close(result[f"{name}/entropy"].double(), entropy, rtol=0, atol=2e-5)
        error = result[f"{name}/h"].double() - grad_hidden
        assert error.norm() / grad_hidden.norm() < tolerance
    shards = torch.cat([result[f"{name}/w"] for result in results]).double()
    assert (shards - grad_weight).norm() / grad_weight.norm() < tolerance
    assert (shards[vocab:] == 0).all()


@pytest.mark.parametrize("name", list(SHAPES))
def test_ranks_agree_bit_for_bit(results: Results, name: str) -> None:
    """Ranks that disagree on a log-prob may clip differently and drift apart."""
    for key in ("logp", "entropy", "h"):
        assert torch.equal(results[0][f"{name}/{key}"], results[1][f"{name}/{key}"])
