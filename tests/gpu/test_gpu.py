"""What only a GPU can show: the CUDA side of the seam, against the same references as on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_mlm.engine.engine import MegatronEngine
from grpo_mlm.kernels.linear_logprobs import linear_logprobs
from tests.kernels.reference import reference
from tests.parallel.samples import hf_logprobs, in_order, make_batch, make_config, make_model, make_world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 6e-3)])
def test_kernel_values_and_gradients_equal_float64(dtype: torch.dtype, tolerance: float) -> None:
    """Logits are fp32 from bf16 operands too (NUM-03): values are held to 1e-4 in both."""
    make = torch.Generator().manual_seed(0)
    hidden = torch.randn(65, 64, generator=make).to("cuda", dtype).requires_grad_()
    weight = (0.3 * torch.randn(384, 64, generator=make)).to("cuda", dtype).requires_grad_()
    targets = torch.randint(0, 301, (65,), generator=make).cuda()
    up_logp, up_entropy = torch.linspace(-1, 2, 65).cuda(), torch.linspace(0.5, -1, 65).cuda()
    logp, entropy = linear_logprobs(hidden, weight, targets, 0.7, 301, 1 << 16)
    (logp @ up_logp + entropy @ up_entropy).backward()
    r_logp, r_entropy, r_hidden, r_weight = reference(hidden, weight, targets, 0.7, 301, up_logp, up_entropy)
    torch.testing.assert_close(logp.double(), r_logp, rtol=0, atol=1e-4)
    torch.testing.assert_close(entropy.double(), r_entropy, rtol=0, atol=1e-4)
    for gradient, expected in ((hidden.grad, r_hidden), (weight.grad, r_weight)):
        assert gradient is not None
        assert ((gradient.double() - expected).norm() / expected.norm()).item() < tolerance


def test_engine_logprobs_and_update_on_one_gpu(tmp_path: Path) -> None:
    """Transformer Engine's layers: log-probs near transformers' (bf16), an update that moves the weights."""
    hf = make_model(tmp_path / "model", "qwen3")
    batch = make_batch([(3, 5), (4, 60), (9, 7)])
    config = make_config(tmp_path / "model", {"dtype": "bfloat16"}, cluster={"device": "cuda"})
    engine = MegatronEngine(config, tmp_path / "model", make_world(), 0)
    engine.start(*engine.open_store())
    try:
        before = {name: weight.clone() for name, weight in engine.parameters().items()}
        schedule = [[[0, 1], [2]]]
        scored = in_order(batch, [engine.logprobs(batch, schedule, "actor")], "logprobs")
        expected = hf_logprobs(hf, batch)[0].detach().numpy()
        assert np.abs(scored - expected).mean() < 0.02
        tokens = len(batch.rollout_logprobs)
        engine.update(batch, schedule, np.full(tokens, 1 / tokens, dtype=np.float32))
        changed = [not torch.equal(weight, before[name]) for name, weight in engine.parameters().items()]
        assert any(changed)
    finally:
        engine.close()
