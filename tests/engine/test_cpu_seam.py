"""What lets megatron-core run without CUDA: the redirection, the optimizer, the refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_mlm.engine.cpu.adam import CpuFusedAdam
from grpo_mlm.engine.cpu.redirect import RedirectCuda
from grpo_mlm.engine.cpu.traps import check_traps
from grpo_mlm.engine.device import open_device
from grpo_mlm.errors import RunFailure


def test_cuda_means_cpu_inside_and_nothing_outside() -> None:
    with RedirectCuda():
        made = torch.zeros(2, device="cuda")
        assert made.device.type == "cpu"
        assert torch.ones(1, dtype=torch.bfloat16, device=torch.device("cuda", 0)).device.type == "cpu"
        assert made.cuda() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, device="cpu").device.type == "cpu"
    assert made.type() == "torch.FloatTensor"
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(2, device="cuda")


def test_fused_adam_equals_torch_adamw() -> None:
    make = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=make) for n in (5, 1000)]
    mine, theirs = ([torch.nn.Parameter(x.clone()) for x in start] for _ in range(2))
    settings: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    fused, reference = CpuFusedAdam(mine, **settings), torch.optim.AdamW(theirs, **settings)
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=make)
            b.grad = a.grad.clone()
        fused.step()
        reference.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.data, b.data, rtol=1e-6, atol=1e-7)


def test_step_count_belongs_to_the_group_and_a_missing_gradient_is_no_step() -> None:
    with_grad, without = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    with_grad.grad = torch.ones(3)
    adam = CpuFusedAdam([with_grad, without], lr=0.1)
    adam.step()
    assert adam.param_groups[0]["step"] == 1
    assert set(adam.state[with_grad]) == {"exp_avg", "exp_avg_sq"}
    assert torch.equal(without.data, torch.ones(3))


SOUND: dict[str, Any] = {
    "virtual_pipeline_model_parallel_size": None,
    "batch_p2p_comm": True,
    "overlap_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
    "tensor_model_parallel_size": 2,
    "expert_tensor_parallel_size": None,
    "expert_model_parallel_size": 1,
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "batch_p2p_comm"),
        ({"overlap_p2p_comm": True}, "deallocate_pipeline_outputs"),
        ({"expert_tensor_parallel_size": 1}, "expert_tensor_parallel_size"),
    ],
)
def test_silently_wrong_combinations_are_refused(change: dict[str, Any], named: str) -> None:
    check_traps(SimpleNamespace(**SOUND))
    with pytest.raises(RunFailure, match=named):
        check_traps(SimpleNamespace(**SOUND | change))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(RunFailure, match=r"cluster\.device"):
        open_device("cuda")
