"""Two and four processes, each with a part of the vocabulary, against the whole one in float64; and with the hidden
states cut along the sequence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_mlm.kernels import planner
from grpo_mlm.kernels.fused_linear_grpo import fused_linear_grpo
from grpo_mlm.kernels.sequence_parallel import gather_rows
from tests.kernels.reference import reference

pytestmark = pytest.mark.slow

Results = list[dict[str, Tensor]]
# name -> (padded vocabulary, true vocabulary, dtype); in `all_padding` the last ranks have no true column at all.
SHAPES = {
    "even": (512, 512, torch.float32),
    "padded": (512, 301, torch.float32),
    "all_padding": (512, 70, torch.float32),
    "bf16": (512, 301, torch.bfloat16),
}
CUTS = ("whole", "tiles", "sequence", "reference", "reference sequence")  # how the hidden states come
LENGTH = 48  # of the whole sequence
ROWS = torch.tensor([*range(1, 20), *range(30, 47, 3)])  # none of them on the third of four ranks before 30


def problem(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    padded, vocab, dtype = SHAPES[name]
    make = torch.Generator().manual_seed(3)
    hidden = torch.randn(LENGTH, 16, generator=make).to(dtype)
    weight = (0.7 * torch.randn(padded, 16, generator=make)).to(dtype)
    weight[vocab:] = 40.0
    targets = torch.randint(0, vocab, (len(ROWS),), generator=make)
    edges = [t for t in (0, 127, 128, 255, 256, vocab - 1) if t < vocab]
    targets[: len(edges)] = torch.tensor(edges)
    by_logprob, by_entropy = torch.randn(2, len(ROWS), generator=make)
    by_logprob[5:12] = by_entropy[5:12] = 0
    return hidden, weight, targets, by_logprob, by_entropy


def one_rank(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = dist.new_group(list(range(ranks)))
    assert group is not None
    out: dict[str, Tensor] = {}
    for name, (padded, vocab, _) in SHAPES.items():
        hidden, weight, targets, by_logprob, by_entropy = problem(name)
        for cut in CUTS:
            by_sequence = cut.endswith("sequence")
            planner._FEWEST_ROWS["cpu"] = 1 << 30 if cut == "tiles" else 1  # this process is the test's own
            h = (hidden.chunk(ranks)[rank] if by_sequence else hidden).clone().requires_grad_()
            w = weight.chunk(ranks)[rank].clone().requires_grad_()
            fused = fused_linear_grpo(
                gather_rows(h, ROWS, group) if by_sequence else h[ROWS],
                w,
                targets,
                lambda logp, ent, rows, a=by_logprob, b=by_entropy: (a[rows] * logp + b[rows] * ent, {}),
                0.7,
                vocab,
                1 << 22 if name == "even" and cut != "tiles" else 6 * (padded // ranks) * 6,
                group,
                "reference" if cut.startswith("reference") else "auto",
                entropy_grad=True,
                partial_hidden_grad=by_sequence,
            )
            fused.loss.backward()
            assert h.grad is not None
            assert w.grad is not None
            found = {"logp": fused.logprobs, "entropy": fused.entropy, "h": h.grad, "w": w.grad}
            for key, value in (found | {"loss": fused.loss}).items():
                out[f"{name}/{cut}/{key}"] = value.detach()
    save_file(out, folder / f"{rank}.safetensors")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp(f"tp{request.param}")
    mp.spawn(one_rank, args=(request.param, folder), nprocs=request.param)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(request.param)]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", list(SHAPES))
def test_values_and_gradients_equal_one_process_in_float64(results: Results, name: str, cut: str) -> None:
    """LOSS-03. With targets at the edges of the shards, padding rows that would win, and shards of padding."""
    _, vocab, dtype = SHAPES[name]
    hidden, weight, targets, by_logprob, by_entropy = problem(name)
    logp, entropy, by_rows, by_weight = reference(
        hidden[ROWS], weight, targets, 0.7, vocab, by_logprob, by_entropy
    )
    by_hidden = torch.zeros(hidden.shape, dtype=torch.float64).index_put((ROWS,), by_rows)
    tolerance = 3e-6 if dtype == torch.float32 else 1e-2
    for result in results:
        torch.testing.assert_close(result[f"{name}/{cut}/logp"].double(), logp, rtol=0, atol=2e-5)
        torch.testing.assert_close(result[f"{name}/{cut}/entropy"].double(), entropy, rtol=0, atol=2e-5)
    parts = [result[f"{name}/{cut}/h"].double() for result in results]
    for got in [torch.cat(parts)] if cut.endswith("sequence") else parts:
        assert (got - by_hidden).norm() / by_hidden.norm() < tolerance
    shards = torch.cat([result[f"{name}/{cut}/w"] for result in results]).double()
    assert (shards - by_weight).norm() / by_weight.norm() < tolerance
    assert (shards[vocab:] == 0).all()


@pytest.mark.parametrize("name", list(SHAPES))
def test_ranks_agree_bit_for_bit(results: Results, name: str) -> None:
    """Ranks that disagree on a log-prob may clip differently and drift apart. How the hidden states came, whole or
    in parts, changes no value either."""
    for result in results:
        for key in ("logp", "entropy", "loss"):
            for cut in ("whole", "sequence"):
                assert torch.equal(result[f"{name}/{cut}/{key}"], results[0][f"{name}/whole/{key}"]), (
                    cut,
                    key,
                )
        assert torch.equal(result[f"{name}/whole/h"], results[0][f"{name}/whole/h"])
