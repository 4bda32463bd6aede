"""What vLLM is told: every option of the config arrives, and no file of the model adds anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from grpo_mlm.config.schema import RolloutConfig
from grpo_mlm.errors import RunFailure, UserError
from grpo_mlm.rollout.request import Request, Sampling
from grpo_mlm.rollout.vllm_options import end_tokens, engine_arguments, sampling_params
from tests.rollout.host import EngineHost
from tests.rollout.models import PROMPTS, encode, load, make_config, reference, rewrite_json

# Those that are no property of an engine: sent with each request, or used by trainer and cluster.
NOT_OF_THE_ENGINE = {"temperature", "top_p", "top_k", "stop", "val_kwargs", "n", "num_engines"}
OTHER_VALUES: dict[str, Any] = {
    "tensor_model_parallel_size": 2,
    "dtype": "bfloat16",
    "max_model_len": 100,
    "max_num_seqs": 7,
    "max_num_batched_tokens": 9999,
    "gpu_memory_utilization": 0.3,
    "kv_cache_gb": 0.25,
    "enforce_eager": True,
    "enable_prefix_caching": False,
}
ONLY_CPU, ONLY_CUDA = {"kv_cache_gb"}, {"gpu_memory_utilization", "enforce_eager"}


def test_every_rollout_option_is_tried_below() -> None:
    assert RolloutConfig.model_fields.keys() == OTHER_VALUES.keys() | NOT_OF_THE_ENGINE


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("option", OTHER_VALUES)
def test_every_rollout_option_reaches_the_engine(option: str, on_cpu: bool, qwen3: Path) -> None:
    """ROL-07: another value of the option changes the engine's arguments, on the devices that it is for."""
    usual, other = (
        engine_arguments(make_config(qwen3, rollout=rollout), qwen3, on_cpu)
        for rollout in ({}, {option: OTHER_VALUES[option]})
    )
    assert (usual != other) == (option not in (ONLY_CUDA if on_cpu else ONLY_CPU))


@pytest.mark.parametrize(
    ("placement", "on_cpu", "expected"),
    [("colocated", False, True), ("disaggregated", False, False), ("colocated", True, None)],
)
def test_an_engine_can_give_its_memory_up_where_it_shares_a_gpu(
    placement: str, on_cpu: bool, expected: bool | None, qwen3: Path
) -> None:
    """vLLM refuses the argument on a CPU, where the same calls do nothing."""
    config = make_config(qwen3, cluster={"placement": placement})
    assert engine_arguments(config, qwen3, on_cpu).get("enable_sleep_mode") is expected


@pytest.mark.parametrize(
    ("option", "value", "argument", "expected"),
    [
        ("data.max_prompt_length", 30, "max_model_len", 78),
        ("data.max_response_length", 30, "max_model_len", 126),
        ("model.trust_remote_code", True, "trust_remote_code", True),
        ("actor.dtype", "bfloat16", "dtype", "bfloat16"),
    ],
)
def test_options_of_other_sections_reach_the_engine(
    option: str, value: Any, argument: str, expected: Any, qwen3: Path
) -> None:
    """ROL-07: an engine has room for the longest prompt and response, and its precision is the actor's."""
    section, name = option.split(".")
    usual, other = (
        engine_arguments(make_config(qwen3, **fields), qwen3, on_cpu=True)
        for fields in ({}, {section: {name: value}})
    )
    assert usual[argument] != expected
    assert other[argument] == expected


def test_a_step_on_a_cpu_has_room_for_the_longest_prompt(qwen3: Path) -> None:
    """A split prompt would crash: no value of the option makes the budget too small."""
    config = make_config(qwen3, rollout={"max_num_batched_tokens": 10, "max_model_len": 140})
    arguments = engine_arguments(config, qwen3, on_cpu=True)
    assert arguments["max_num_batched_tokens"] == 140
    assert arguments["enable_chunked_prefill"] is False


def test_the_mask_of_unknown_ids_is_there_only_where_it_is_needed(qwen3: Path, odd_model: Path) -> None:
    """ROL-10: a model with exactly its tokenizer's tokens samples without it."""
    masks = [
        engine_arguments(make_config(folder), folder, on_cpu=True).get("logits_processors", [])
        for folder in (qwen3, odd_model)
    ]
    assert masks == [[], ["grpo_mlm.rollout.vocabulary:KnownTokens"]]


def test_end_tokens_come_from_both_files(tmp_path: Path) -> None:
    assert end_tokens(tmp_path) == []
    rewrite_json(tmp_path / "config.json", eos_token_id=2)
    assert end_tokens(tmp_path) == [2]
    rewrite_json(tmp_path / "generation_config.json", eos_token_id=[7, 2])
    assert end_tokens(tmp_path) == [2, 7]
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        end_tokens(tmp_path)


EXTRA_END = 9  # named by generation_config.json alone
OPTIONS = {"max_num_seqs": 7, "max_num_batched_tokens": 999, "kv_cache_gb": 0.07, "max_model_len": 130}


@pytest.fixture(scope="module")
def odd_model(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 12 rows more than its tokenizer has tokens, whose logits are far the largest, and with a
    generation_config.json full of opinions."""
    folder = tmp_path_factory.mktemp("odd") / "model"
    source, tokenizer = load(llama), AutoTokenizer.from_pretrained(llama)
    config = AutoConfig.from_pretrained(llama)
    config.vocab_size = len(tokenizer) + 12
    model = LlamaForCausalLM(config)
    weights = source.state_dict()
    make = torch.Generator().manual_seed(3)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = 20 * torch.randn(12, weights[name].shape[1], generator=make)
        weights[name] = torch.cat([weights[name], rows])
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    opinions = {"do_sample": True, "repetition_penalty": 1.5, "top_k": 3, "top_p": 0.5, "temperature": 0.3}
    eos = [model.config.eos_token_id, EXTRA_END]
    (folder / "generation_config.json").write_text(json.dumps(opinions | {"eos_token_id": eos}))
    return folder


@pytest.fixture(scope="module")
def engine(odd_model: Path) -> Iterator[EngineHost]:
    host = EngineHost(make_config(odd_model, rollout=OPTIONS | {"enable_prefix_caching": False}), odd_model)
    yield host
    host.stop()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_generation_config_nor_unknown_ids_leak_into_samples(
    engine: EngineHost, odd_model: Path, temperature: float
) -> None:
    """ROL-01 and ROL-10: log-probs are transformers' own over the ids that the tokenizer knows, no other id is
    ever drawn although its logit is the largest, and the end token that only generation_config.json has ends."""
    model, known = load(odd_model), len(AutoTokenizer.from_pretrained(odd_model))
    requests = [
        Request(g, i, encode(odd_model, p), 10 * g + i) for g, p in enumerate(PROMPTS) for i in range(8)
    ]
    samples = engine.generate(requests, Sampling(temperature, 32))
    unknown_is_largest = 0
    for request, done in zip(requests, samples, strict=True):
        expected, picks = reference(model, request.prompt_ids, done.token_ids, known=known)
        torch.testing.assert_close(torch.from_numpy(done.logprobs), expected, rtol=0, atol=1e-4)
        assert done.token_ids.max() < known
        unknown_is_largest += int((reference(model, request.prompt_ids, done.token_ids)[1] >= known).sum())
        if temperature == 0.0:
            assert picks.tolist() == done.token_ids.tolist()
    assert unknown_is_largest > 100
    if temperature == 1.0:
        ended = [done for done in samples if done.token_ids[-1] == EXTRA_END]
        assert ended
        assert all(done.finish_reason == "stop" for done in ended)


def _params(engine: Any, sampling: Sampling) -> dict[str, Any]:
    params = sampling_params(sampling, 5, [9])
    return {name: getattr(params, name) for name in params.__struct_fields__ if not name.startswith("_")}


@pytest.mark.slow
def test_a_request_states_every_field_that_changes_what_is_sampled(engine: EngineHost) -> None:
    """ROL-01, ROL-07: plain sampling is temperature alone, and every field of ours arrives."""
    plain = Sampling(0.7, 11)
    params = engine.call(_params, plain)
    off = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
           "frequency_penalty": 0.0, "logit_bias": None, "allowed_token_ids": None, "min_tokens": 0}  # fmt: skip
    assert {name: params[name] for name in off} == off
    assert params["top_k"] in (0, -1)
    stated = {"temperature": 0.7, "max_tokens": 11, "seed": 5, "stop_token_ids": [9], "logprobs": 0, "n": 1}
    assert {name: params[name] for name in stated} == stated
    others = {"temperature": 0.2, "max_tokens": 3, "top_p": 0.5, "top_k": 4, "stop": ("x",)}
    assert others.keys() == {field.name for field in fields(Sampling)}
    for name, value in others.items():
        assert engine.call(_params, replace(plain, **{name: value})) != params


def _seen(engine: Any) -> dict[str, Any]:
    config = engine._engine.vllm_config
    return {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "chunked": config.scheduler_config.enable_chunked_prefill,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "prefix": config.cache_config.enable_prefix_caching,
        "max_model_len": config.model_config.max_model_len,
        "dtype": config.model_config.dtype,
        "logprobs_mode": config.model_config.logprobs_mode,
        "eager": config.model_config.enforce_eager,
    }


@pytest.mark.slow
def test_the_engine_runs_with_the_options_that_it_was_given(engine: EngineHost) -> None:
    """ROL-07: nothing on the way to vLLM's own configuration drops or changes them."""
    assert engine.call(_seen) == {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 999,
        "chunked": False,
        "kv_cache_memory_bytes": 75161928,
        "prefix": False,
        "max_model_len": 130,
        "dtype": torch.float32,
        "logprobs_mode": "processed_logprobs",
        "eager": True,
    }


def _break(engine: Any, requests: list[Request]) -> None:
    """A step that fails, as it does when a kernel or a worker process dies."""
    waiting = engine.generate(requests, Sampling(1.0, 90))
    next(waiting)

    def fail() -> None:
        raise ValueError("no such kernel")

    engine._engine.step = fail
    list(waiting)


def _generate(engine: Any, requests: list[Request]) -> None:
    next(engine.generate(requests, Sampling(1.0, 8)))


@pytest.mark.slow
def test_a_broken_engine_fails_its_waiters_and_every_later_call(engine: EngineHost, odd_model: Path) -> None:
    """Nobody waits for ever. The last test of this engine."""
    requests = [Request(g, 0, encode(odd_model, text), g) for g, text in enumerate(PROMPTS)]
    for call in (_break, _generate):
        with pytest.raises(RunFailure, match="engine 0 broke down: ValueError: no such kernel"):
            engine.call(call, requests)
