"""The engine's log-probs and gradients against transformers, one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.parallel import jobs
from tests.parallel.ranks import Ranks
from tests.parallel.samples import hf_logprobs, in_order, make_batch, make_config, make_world, whole

pytestmark = pytest.mark.slow

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied, one kv head": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2 with its biases": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama, norm epsilon 1e-2 (CNV-07)": ("llama", {"rms_norm_eps": 1e-2}),
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3 with its fused tensors": ("phi3", {"pad_token_id": None}),
    "llama with attention biases": ("llama", {"attention_bias": True}),
    "rope linear (CNV-06)": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}},
    ),
    "rope llama3 (CNV-06)": ("llama", {"rope_parameters": LLAMA3}),
}
LENGTHS = [(3, 5), (4, 121), (2, 1), (9, 0), (6, 30), (5, 29), (1, 90)]
SCHEDULE = [[[4, 0, 3], [1, 2], [6, 5]]]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_and_entropies_equal_transformers(
    name: str, ranks: Ranks, model: Callable[..., Any]
) -> None:
    """Positions reach 125, so that a wrong rope scaling shows; the temperature is not 1."""
    family, fields = MODELS[name]
    folder, hf = model(family, **fields)
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder, temperature=0.7), folder, make_world()) as run:
        replies = run(jobs.score, batch, SCHEDULE)
    logprobs, entropies = (values.detach().numpy() for values in hf_logprobs(hf, batch, 0.7))
    np.testing.assert_allclose(in_order(batch, replies, "logprobs"), logprobs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(in_order(batch, replies, "entropy"), entropies, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_that_the_tokenizer_does_not_know_enter_no_softmax(
    tp: int, ranks: Ranks, model: Callable[..., Any], tmp_path: Path
) -> None:
    """ROL-10: as in the engine, which samples none of them. 128 rows, 100 tokens: the last rank's share is cut."""
    source, hf = model("llama", vocab_size=128)
    folder = shutil.copytree(source, tmp_path / "model")
    names = {f"token{i}": i for i in range(100)}
    Tokenizer(WordLevel(names, unk_token="token0")).save(str(folder / "tokenizer.json"))
    batch = make_batch(LENGTHS)
    with ranks.engines(make_config(folder, temperature=0.7), folder, make_world(tp=tp)) as run:
        replies = run(jobs.score, batch, SCHEDULE)
    logprobs, entropies = (values.detach().numpy() for values in hf_logprobs(hf, batch, 0.7, known=100))
    np.testing.assert_allclose(in_order(batch, replies, "logprobs"), logprobs, atol=1e-4, rtol=0)
    np.testing.assert_allclose(in_order(batch, replies, "entropy"), entropies, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_transformers(name: str, ranks: Ranks, model: Callable[..., Any]) -> None:
    """With ratio 1 the gradient is that of -sum w A logp; every parameter of the model gets one."""
    family, fields = MODELS[name]
    folder, hf = model(family, **fields)
    batch = make_batch(LENGTHS)
    weights = np.linspace(0.5, 1.5, len(batch.advantages)).astype(np.float32)
    with ranks.engines(make_config(folder), folder, make_world()) as run:
        [(grads, loss)] = run(jobs.gradients, batch, SCHEDULE, weights)
    logprobs, _ = hf_logprobs(hf, batch)
    scale = -(batch.advantages * weights).astype(np.float64)
    hf.zero_grad()
    (logprobs * logprobs.new_tensor(scale)).sum().backward()
    expected = {name: parameter.grad.numpy() for name, parameter in hf.named_parameters()}
    assert loss == pytest.approx(scale.sum(), rel=1e-5)
    actual = whole(Path(folder), make_world(), [grads])
    assert actual.keys() == expected.keys()
    for tensor, values in expected.items():
        np.testing.assert_allclose(
            actual[tensor], values, atol=2e-5 * abs(values).max(), rtol=0, err_msg=tensor
        )
