"""Rules that span several keys. Each names the settings, their values, and the way out."""

from __future__ import annotations

import re
from collections.abc import Iterator

from grpo_mlm.config.check_algorithm import ALGORITHM_RULES
from grpo_mlm.config.explain import raise_problems
from grpo_mlm.config.names import is_function
from grpo_mlm.config.schema import Config
from grpo_mlm.config.suggest import did_you_mean
from grpo_mlm.config.world import idle_replicas
from grpo_mlm.layouts.spec import ModelSpec

BUILTIN_REWARDS = ("exact_match", "math", "reasoning_gym")
VLLM_VOCAB_MULTIPLE = 64


def check_config(config: Config) -> None:
    """UserError listing every broken rule; needs neither model files nor devices."""
    raise_problems("config", broken_rules(config))


def broken_rules(config: Config) -> list[str]:
    """One sentence for every broken rule."""
    rules = (*ALGORITHM_RULES, _sampler, _validation, _lengths, _batches, _rewards, _prompts, _run)
    return [problem for rule in rules for problem in rule(config)]


def _sampler(c: Config) -> Iterator[str]:
    r = c.rollout
    if r.temperature == 0:
        yield (
            "rollout.temperature=0: log-probs are taken at this temperature, so it must be > 0 in training; "
            "greedy sampling is for rollout.val_kwargs.temperature"
        )
    for key, value, off in (("top_p", r.top_p, 1), ("top_k", r.top_k, -1)):
        if value != off:
            yield (
                f"rollout.{key}={value}: the trainer's log-probs are those of the whole distribution, so it must be "
                f"{off} in training; rollout.val_kwargs.{key} may differ"
            )
    if "" in r.stop:
        yield "rollout.stop has an empty string, which would end every response at once; remove it"
    if r.max_num_batched_tokens is not None and r.max_num_batched_tokens < r.max_num_seqs:
        yield (
            f"rollout.max_num_batched_tokens={r.max_num_batched_tokens} is less than "
            f"rollout.max_num_seqs={r.max_num_seqs}: an engine step holds a token of each; raise one or lower the other"
        )


def _validation(c: Config) -> Iterator[str]:
    val = c.rollout.val_kwargs
    if val.temperature == 0 and val.n > 1:
        yield (
            f"rollout.val_kwargs.n={val.n} with rollout.val_kwargs.temperature=0: greedy samples are all alike; "
            "set n to 1 or a temperature"
        )
    if c.trainer.test_freq > 0 and not c.data.val_files:
        yield f"trainer.test_freq={c.trainer.test_freq} without data.val_files: name some, or set test_freq to -1"


def _lengths(c: Config) -> Iterator[str]:
    total = c.data.max_prompt_length + c.data.max_response_length
    parts = (
        f"data.max_prompt_length={c.data.max_prompt_length} + data.max_response_length={c.data.max_response_length} "
        f"= {total}"
    )
    limits = (
        ("rollout.max_model_len", c.rollout.max_model_len),
        ("actor.max_tokens_per_gpu", c.actor.max_tokens_per_gpu),
    )
    for key, limit in limits:
        if limit is not None and total > limit:
            yield f"{parts} tokens, more than {key}={limit}: lower the lengths or raise it"


def _batches(c: Config) -> Iterator[str]:
    if c.data.train_batch_size % c.mini_batch_size:
        yield (
            f"actor.ppo_mini_batch_size={c.mini_batch_size} does not divide "
            f"data.train_batch_size={c.data.train_batch_size} (both count prompts)"
        )
    dp = c.actor.megatron.data_parallel_size
    problem = idle_replicas(c, dp) if dp is not None else None
    if problem:
        yield problem


def _rewards(c: Config) -> Iterator[str]:
    functions = c.reward.functions
    for i, function in enumerate(functions):
        name = function.name
        if name not in BUILTIN_REWARDS and not is_function(name):
            yield (
                f"reward.functions.{i}.name={name!r}: expected {', '.join(BUILTIN_REWARDS)}, module:function "
                "or path/to/file.py:function" + did_you_mean(name, BUILTIN_REWARDS)
            )
        if name in [other.name for other in functions[:i]]:
            yield f"reward.functions.{i}.name={name} is there twice; a reward's parts are told apart by name"
    if not any(function.weight for function in functions):
        yield "reward.functions: every weight is 0, so every reward would be; give one another weight"


def _prompts(c: Config) -> Iterator[str]:
    data = c.data
    if not data.apply_chat_template:
        for key in ("system_prompt", "chat_template_kwargs"):
            if getattr(data, key):
                yield (
                    f"data.{key} has no effect with data.apply_chat_template=false: it is the template that takes it; "
                    "drop one of them"
                )


def _run(c: Config) -> Iterator[str]:
    if not re.fullmatch(r"\w[\w.-]*", c.run.name):
        yield f"run.name={c.run.name!r} names a directory: use letters, digits, '.', '_' and '-'"
    if c.model.maker is not None and not is_function(c.model.maker):
        yield f"model.maker={c.model.maker!r}: expected module:function or path/to/file.py:function"
    if c.cluster.nnodes > 1 and c.cluster.address is None:
        yield (
            f"cluster.nnodes={c.cluster.nnodes} without cluster.address: a cluster started for this run alone is this "
            "one node; start Ray on the nodes and set cluster.address=auto"
        )
    debug = c.trainer.debug
    if debug.load_rollouts is not None and debug.save_rollouts is not None:
        yield (
            "trainer.debug.load_rollouts and trainer.debug.save_rollouts: a replayed step samples nothing to save; "
            "drop one of them"
        )


def check_model(config: Config, spec: ModelSpec) -> None:
    """UserError listing every rule of this model that the parallel sizes and lengths break."""
    raise_problems("config", [*_model_kind(spec), *_model_sizes(config, spec), *_model_lengths(config, spec)])


def _model_kind(spec: ModelSpec) -> Iterator[str]:
    if spec.moe is not None:
        yield (
            f"model.path: {spec.family} is a mixture of {spec.moe.experts} experts; the trainer has dense models only. "
            "Its weights can be converted (grpo-mlm convert)"
        )


def _model_sizes(c: Config, spec: ModelSpec) -> Iterator[str]:
    """What each side must be able to cut evenly: megatron-core pads the vocabulary itself, vLLM to 64."""
    rollout_vocab = -(-spec.vocab_size // VLLM_VOCAB_MULTIPLE) * VLLM_VOCAB_MULTIPLE
    sides = (
        ("actor.megatron", c.actor.megatron.tensor_model_parallel_size, None),
        ("rollout", c.rollout.tensor_model_parallel_size, rollout_vocab),
    )
    for section, tp, vocab in sides:
        key = f"{section}.tensor_model_parallel_size={tp}"
        numbers = (("attention heads", spec.heads), ("MLP width", spec.ffn), ("padded vocabulary", vocab))
        for name, number in numbers:
            if number is not None and number % tp:
                yield f"{key} does not divide the model's {name} {number}"
        if spec.kv_heads % tp and tp % spec.kv_heads:
            yield f"{key} neither divides the model's key-value heads {spec.kv_heads} nor is a multiple of them"
    pp = c.actor.megatron.pipeline_model_parallel_size
    if spec.layers % pp:
        yield f"actor.megatron.pipeline_model_parallel_size={pp} does not divide the model's layers {spec.layers}"


def _model_lengths(c: Config, spec: ModelSpec) -> Iterator[str]:
    limit = f"the model's max_position_embeddings {spec.max_position_embeddings}"
    total = c.data.max_prompt_length + c.data.max_response_length
    if total > spec.max_position_embeddings:
        yield (
            f"data.max_prompt_length={c.data.max_prompt_length} + "
            f"data.max_response_length={c.data.max_response_length} = {total} tokens, more than {limit}"
        )
    if c.rollout.max_model_len is not None and c.rollout.max_model_len > spec.max_position_embeddings:
        yield f"rollout.max_model_len={c.rollout.max_model_len} is more than {limit}"
