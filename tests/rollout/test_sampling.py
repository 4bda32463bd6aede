"""What a sample is: ids, log-probs and text as the engine drew them, for a seed and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo_mlm.errors import RunFailure
from grpo_mlm.rollout.request import Completion, Request, Sampling
from tests.rollout.host import EngineHost, ready
from tests.rollout.models import PROMPTS, encode, load, make_config, reference

pytestmark = pytest.mark.slow

LONG = 24  # responses, in tokens
DRAW = Sampling(temperature=1.0, max_tokens=LONG)
GREEDY = Sampling(temperature=0.0, max_tokens=LONG)


@pytest.fixture(scope="module")
def engine(qwen3: Path) -> Iterator[EngineHost]:
    # Steps with room for one long prompt and a part of the next: what may not be split has to wait.
    host = EngineHost(make_config(qwen3, rollout={"max_num_batched_tokens": 160}), qwen3)
    host.call(ready)
    yield host
    host.stop()


def ask(folder: Path, prompts: tuple[str, ...] = PROMPTS, n: int = 1, seed: int = 0) -> list[Request]:
    return [
        Request(group, i, encode(folder, text), seed + 1000 * group + i)
        for group, text in enumerate(prompts)
        for i in range(n)
    ]


def same(one: Completion, other: Completion) -> bool:
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs)


def test_greedy_samples_are_those_of_transformers(engine: EngineHost, qwen3: Path) -> None:
    """ROL-13: the same model run directly picks the same tokens for 8 prompts."""
    model, requests = load(qwen3), ask(qwen3)
    assert len(requests) == 8
    for request, done in zip(requests, engine.generate(requests, GREEDY), strict=True):
        logprobs, picks = reference(model, request.prompt_ids, done.token_ids)
        assert picks.tolist() == done.token_ids.tolist()
        torch.testing.assert_close(torch.from_numpy(done.logprobs), logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_log_probs_are_those_of_the_tempered_distribution(
    engine: EngineHost, qwen3: Path, temperature: float
) -> None:
    """ROL-02: equal to transformers' logits / T to 1e-4, and at 0.6 far from those without a temperature."""
    model, requests, untempered = load(qwen3), ask(qwen3, n=2), 0.0
    for request, done in zip(requests, engine.generate(requests, Sampling(temperature, LONG)), strict=True):
        expected, _ = reference(model, request.prompt_ids, done.token_ids, temperature)
        torch.testing.assert_close(torch.from_numpy(done.logprobs), expected, rtol=0, atol=1e-4)
        plain, _ = reference(model, request.prompt_ids, done.token_ids)
        untempered = max(untempered, (torch.from_numpy(done.logprobs) - plain).abs().max().item())
    assert (untempered > 0.1) == (temperature != 1.0)


def test_every_id_has_its_log_prob_and_the_stop_token_stays(engine: EngineHost, qwen3: Path) -> None:
    """MSK-06: a sample that ended by itself ends with the end token, which counts and has a log-prob."""
    end = load(qwen3).config.eos_token_id
    samples = engine.generate(ask(qwen3, n=8), Sampling(1.0, 64))
    reasons = {"stop": 0, "length": 0}
    for done in samples:
        assert len(done.token_ids) == len(done.logprobs)
        assert done.token_ids.dtype == np.int64
        assert done.logprobs.dtype == np.float32
        assert end not in done.token_ids[:-1]
        reasons[done.finish_reason] += 1
        if done.finish_reason == "stop":
            assert done.token_ids[-1] == end
            assert "<eos>" not in done.text
        else:
            assert len(done.token_ids) == 64
    assert all(reasons.values()), reasons


def test_a_stop_string_stays_in_text_and_ids(engine: EngineHost, qwen3: Path) -> None:
    """MSK-07: reward text ends with the string, and the ids are exactly the text's."""
    free = engine.generate(ask(qwen3, n=4), DRAW)
    stop = next(done.text[5:7] for done in free if len(done.text) > 8)
    stopped = engine.generate(ask(qwen3, n=4), Sampling(1.0, LONG, stop=(stop,)))
    hits = 0
    for whole, cut in zip(free, stopped, strict=True):
        if stop not in whole.text:
            assert same(whole, cut)
            continue
        hits += 1
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop) + len(stop)]
        assert len(cut.token_ids) == len(cut.logprobs)
        np.testing.assert_array_equal(cut.token_ids, whole.token_ids[: len(cut.token_ids)])
    assert hits


def test_a_seed_fixes_a_sample_whatever_runs_beside_it(engine: EngineHost, qwen3: Path) -> None:
    """ROL-05: alone, among others, and in another order; other seeds give other samples."""
    requests = ask(qwen3, n=4)
    together = engine.generate(requests, DRAW)
    backwards = engine.generate(requests[::-1], DRAW)[::-1]
    alone = [engine.generate([request], DRAW)[0] for request in requests[:3]]
    assert all(same(a, b) for a, b in zip(together, backwards, strict=True))
    assert all(same(a, b) for a, b in zip(together, alone, strict=False))
    assert len({done.token_ids.tobytes() for done in together}) == len(together)
    other = engine.generate(ask(qwen3, n=4, seed=77), DRAW)
    assert not any(same(a, b) for a, b in zip(together, other, strict=True))


def test_many_seeded_prompts_at_once_are_never_split(engine: EngineHost, qwen3: Path) -> None:
    """16 prompts x 8 samples, near the engine's limits: a split prompt would rewind its generator and crash."""
    prompts = tuple(f"{i}+{i * 7}=" + "9*8-7+6/5=" * 8 for i in range(16))
    samples = engine.generate(ask(qwen3, prompts, n=8), Sampling(1.0, 36))
    assert len(samples) == 128
    assert all(done.finish_reason in ("stop", "length") for done in samples)


def test_a_prompt_too_long_for_the_engine_harms_no_other(engine: EngineHost, qwen3: Path) -> None:
    """ROL-06: it comes back empty and aborted; one that just fits is cut at the engine's length."""
    good = ask(qwen3, PROMPTS[:2])
    full = 96 + 48
    sampling = Sampling(0.0, 48)
    too_long = Request(8, 0, tuple([5] * full), 1)
    just_fits = Request(9, 0, tuple([5] * (full - 2)), 1)
    *others, aborted, cut = engine.generate([*good, too_long, just_fits], sampling)
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.logprobs) == 0
    assert len(cut.token_ids) <= 2
    alone = engine.generate(good, sampling)
    assert all(same(a, b) for a, b in zip(others, alone, strict=True))


def _take_two(engine: Any, requests: list[Request], sampling: Sampling) -> tuple[int, int]:
    """Leave a generation after two samples; samples still running then, and after the next generation."""
    samples = engine.generate(requests, sampling)
    next(samples)
    next(samples)
    samples.close()
    running = engine._stepper.call(lambda: engine._stepper.running)  # after what `close` asked for
    return running, len(list(engine.generate(requests, sampling)))


def test_samples_that_nobody_waits_for_are_dropped(engine: EngineHost, qwen3: Path) -> None:
    assert engine.call(_take_two, ask(qwen3, n=4), Sampling(1.0, 48)) == (0, 32)


def _order(engine: Any, requests: list[Request], sampling: Sampling) -> list[int]:
    return [len(done.token_ids) for done in engine.generate(requests, sampling)]


def test_samples_come_in_the_order_in_which_they_finish(engine: EngineHost, qwen3: Path) -> None:
    """So that a reward can be computed while others still decode."""
    lengths = engine.call(_order, ask(qwen3, n=4), Sampling(1.0, 48))
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_an_impossible_request_fails_by_itself(engine: EngineHost, qwen3: Path) -> None:
    """An id outside the vocabulary: an error, nothing left running, and the engine goes on."""
    with pytest.raises(RunFailure, match=r"request 99-0: .*10000 is out of vocabulary"):
        engine.generate([*ask(qwen3), Request(99, 0, (10_000,), 1)], DRAW)
    assert len(engine.generate(ask(qwen3), DRAW)) == 8


def _after_shutdown(engine: Any, requests: list[Request], sampling: Sampling) -> None:
    engine.shutdown()
    next(engine.generate(requests, sampling))


def test_an_engine_that_was_shut_down_says_so(engine: EngineHost, qwen3: Path) -> None:
    """The last test of this engine."""
    with pytest.raises(RunFailure, match="shut down"):
        engine.call(_after_shutdown, ask(qwen3), DRAW)
