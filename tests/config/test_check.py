"""Rules that span keys: each broken one is named with its settings, all of them in one error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from grpo_mlm.config import Config, check_model
from grpo_mlm.errors import UserError
from grpo_mlm.layouts.spec import ModelSpec, Rope

Load = Callable[..., Config]
Refusal = Callable[..., str]

MODEL = ModelSpec("llama", 96, 6, 12, 3, 8, 120, 100, False, False, False, False, 1e-5, Rope(1e4), 1024)


def model_refusal(config: Config, spec: ModelSpec) -> str:
    with pytest.raises(UserError) as caught:
        check_model(config, spec)
    return str(caught.value)


# Each case: overrides that break one rule, and the settings that the error must name.
BROKEN = {
    "ADV-03 group of one, grpo": (["rollout.n=1"], ["rollout.n=1", "algorithm.adv_estimator=grpo"]),
    "ADV-03 group of one, dr_grpo": (
        ["rollout.n=1", "algorithm.adv_estimator=dr_grpo"],
        ["rollout.n=1", "algorithm.adv_estimator=dr_grpo"],
    ),
    "KL-09 coefficient in the loss without its switch": (
        ["actor.kl_loss_coef=0.1"],
        ["actor.kl_loss_coef=0.1", "actor.use_kl_loss=false"],
    ),
    "KL-06 switch in the loss without its coefficient": (
        ["actor.use_kl_loss=true"],
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0"],
    ),
    "coefficient in the reward without its switch": (
        ["algorithm.kl_ctrl.kl_coef=0.1"],
        ["algorithm.kl_ctrl.kl_coef=0.1", "algorithm.use_kl_in_reward=false"],
    ),
    "switch in the reward without its coefficient": (
        ["algorithm.use_kl_in_reward=true"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0"],
    ),
    "KL-04 both forms": (
        [
            "actor.use_kl_loss=true",
            "actor.kl_loss_coef=0.1",
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.kl_coef=0.1",
        ],
        ["actor.use_kl_loss=true", "algorithm.use_kl_in_reward=true"],
    ),
    "KL-02 k1 in the loss": (
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=k1"],
        ["actor.kl_loss_type=k1", "k1+"],
    ),
    "KL-02 kl in the loss": (
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=kl"],
        ["actor.kl_loss_type=kl", "kl+"],
    ),
    "+ in the reward": (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=k3+"],
        ["algorithm.kl_penalty=k3+", "use k3"],
    ),
    "ROL-03 training temperature 0": (
        ["rollout.temperature=0"],
        ["rollout.temperature=0", "val_kwargs.temperature"],
    ),
    "ROL-02 top_p": (["rollout.top_p=0.9"], ["rollout.top_p=0.9"]),
    "ROL-02 top_k": (["rollout.top_k=50"], ["rollout.top_k=50"]),
    "ROL-02 top_k 0": (["rollout.top_k=0"], ["rollout.top_k=0"]),
    "empty stop string": (['rollout.stop=["x", ""]'], ["rollout.stop"]),
    "engine step smaller than its requests": (
        ["rollout.max_num_batched_tokens=64", "rollout.max_num_seqs=65"],
        ["rollout.max_num_batched_tokens=64", "rollout.max_num_seqs=65"],
    ),
    "several greedy samples": (
        ["rollout.val_kwargs.n=2"],
        ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=0"],
    ),
    "validation without rows": (
        ["data.val_files=[]", "trainer.test_freq=5"],
        ["trainer.test_freq=5", "data.val_files"],
    ),
    "ROL-06 lengths above max_model_len": (
        ["data.max_prompt_length=100", "data.max_response_length=101", "rollout.max_model_len=200"],
        ["data.max_prompt_length=100", "data.max_response_length=101", "201", "rollout.max_model_len=200"],
    ),
    "a sample above max_tokens_per_gpu": (
        ["data.max_prompt_length=100", "data.max_response_length=101", "actor.max_tokens_per_gpu=200"],
        ["data.max_prompt_length=100", "data.max_response_length=101", "201", "actor.max_tokens_per_gpu=200"],
    ),
    "mini-batch does not divide": (
        ["data.train_batch_size=10", "actor.ppo_mini_batch_size=4"],
        ["data.train_batch_size=10", "actor.ppo_mini_batch_size=4"],
    ),
    "mini-batch above the batch": (
        ["data.train_batch_size=4", "actor.ppo_mini_batch_size=8"],
        ["data.train_batch_size=4", "actor.ppo_mini_batch_size=8"],
    ),
    "CFG-03 fewer samples than replicas": (
        [
            "data.train_batch_size=2",
            "actor.ppo_mini_batch_size=1",
            "rollout.n=3",
            "actor.megatron.data_parallel_size=4",
        ],
        ["rollout.n=3", "actor.megatron.data_parallel_size", "4 data-parallel"],
    ),
    "norm mode without its constant": (
        ["actor.loss_agg_mode=seq-mean-token-sum-norm"],
        ["actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor"],
    ),
    "constant without the norm mode": (
        ["actor.loss_scale_factor=512"],
        ["actor.loss_scale_factor=512", "actor.loss_agg_mode=token-mean"],
    ),
    "RWD-20 unknown reward": (
        ["reward.functions.0.name=exact_mach"],
        ["reward.functions.0.name", "exact_mach", "math", "reasoning_gym", "did you mean exact_match"],
    ),
    "reward twice": (["reward.functions=[{name: math}, {name: math}]"], ["reward.functions.1.name=math"]),
    "RWD-25 no reward counts": (["reward.functions.0.weight=0"], ["reward.functions", "weight"]),
    "system prompt without a template": (
        ["data.apply_chat_template=false", "data.system_prompt=Be brief."],
        ["data.system_prompt", "data.apply_chat_template=false"],
    ),
    "template arguments without a template": (
        ["data.apply_chat_template=false", "data.chat_template_kwargs={a: 1}"],
        ["data.chat_template_kwargs", "data.apply_chat_template=false"],
    ),
    "run name with a slash": (["run.name=a/b"], ["run.name='a/b'"]),
    "maker that is no function": (
        ["model.maker=some.module"],
        ["model.maker='some.module'", "module:function"],
    ),
    "several nodes without a cluster": (["cluster.nnodes=2"], ["cluster.nnodes=2", "cluster.address"]),
    "save while replaying": (
        ["trainer.debug.load_rollouts=a.safetensors", "trainer.debug.save_rollouts=b"],
        ["trainer.debug.load_rollouts", "trainer.debug.save_rollouts"],
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named_alone_with_its_settings(refusal: Refusal, case: str) -> None:
    overrides, named = BROKEN[case]
    message = refusal(*overrides)
    assert "problems" not in message
    assert [text for text in named if text not in message] == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["rollout.n=2"],
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=k1+"],
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=k1"],
        ["rollout.temperature=0.6", "rollout.val_kwargs={temperature: 0, top_p: 0.9, top_k: 20}"],
        ["rollout.val_kwargs={temperature: 0.6, n: 4}"],
        ["data.max_prompt_length=100", "data.max_response_length=100", "rollout.max_model_len=200"],
        ["data.max_prompt_length=100", "data.max_response_length=100", "actor.max_tokens_per_gpu=200"],
        ["data.train_batch_size=12", "actor.ppo_mini_batch_size=4"],
        ["actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=512"],
        ["reward.functions=[{name: 'my_pkg.rewards:length', weight: -0.1}, {name: math}]"],
        ["data.val_files=[]"],
        ["data.apply_chat_template=false"],
        ["cluster.nnodes=2", "cluster.address=auto"],
        # A count of samples that dp does not divide trains: micro-batches are cut by tokens.
        ["data.train_batch_size=5", "rollout.n=3", "actor.megatron.data_parallel_size=2"],
    ],
)
def test_what_looks_like_it_but_is_right_passes(load: Load, overrides: list[str]) -> None:
    load(*overrides)


def test_every_broken_rule_is_in_one_error(refusal: Refusal) -> None:
    message = refusal(
        "rollout.n=1", "rollout.temperature=0", "rollout.top_p=0.5", "actor.kl_loss_coef=1", "run.name=/"
    )
    assert "5 problems" in message
    for setting in (
        "rollout.n=1",
        "rollout.temperature=0",
        "rollout.top_p=0.5",
        "actor.kl_loss_coef=1",
        "run.name",
    ):
        assert setting in message


# Rules of the model


@pytest.mark.parametrize(
    ("overrides", "spec", "named"),
    [
        (
            ["actor.megatron.tensor_model_parallel_size=8"],
            MODEL,
            ["actor.megatron.tensor_model", "=8", "heads 12"],
        ),
        (["actor.megatron.tensor_model_parallel_size=2"], MODEL, ["=2", "key-value heads 3"]),
        (
            ["actor.megatron.tensor_model_parallel_size=3"],
            replace(MODEL, ffn=100),
            ["actor.megatron.tensor_model_parallel_size=3", "MLP width 100"],
        ),
        (
            ["actor.megatron.pipeline_model_parallel_size=4"],
            MODEL,
            ["pipeline_model_parallel_size=4", "layers 6"],
        ),
        (
            ["rollout.tensor_model_parallel_size=5"],
            MODEL,
            ["rollout.tensor_model_parallel_size=5", "heads 12"],
        ),
        (
            ["rollout.tensor_model_parallel_size=2"],
            MODEL,
            ["rollout.tensor_model_parallel_size=2", "heads 3"],
        ),
        (
            ["rollout.tensor_model_parallel_size=3"],
            MODEL,
            ["rollout.tensor_model_parallel_size=3", "vocabulary 128"],
        ),
        (
            ["data.max_prompt_length=513"],
            MODEL,
            ["data.max_prompt_length=513", "1025", "max_position_embeddings 1024"],
        ),
        (
            ["rollout.max_model_len=1025"],
            MODEL,
            ["rollout.max_model_len=1025", "max_position_embeddings 1024"],
        ),
    ],
)
def test_sizes_that_the_model_does_not_divide_by(
    load: Load, overrides: list[str], spec: ModelSpec, named: list[str]
) -> None:
    """CFG-04, ROL-06."""
    message = model_refusal(load(*overrides), spec)
    assert [text for text in named if text not in message] == []


def test_all_broken_model_rules_are_in_one_error(load: Load) -> None:
    config = load("actor.megatron.pipeline_model_parallel_size=4", "rollout.max_model_len=5000")
    assert "2 problems" in model_refusal(config, MODEL)


@pytest.mark.parametrize(
    ("actor_tp", "pp", "rollout_tp"),
    [(1, 1, 1), (3, 2, 1), (6, 3, 1), (1, 6, 2), (3, 1, 4)],
)
def test_sizes_that_divide_pass(load: Load, actor_tp: int, pp: int, rollout_tp: int) -> None:
    """Key-value heads may be fewer than ranks: they are then held several times."""
    config = load(
        f"actor.megatron.tensor_model_parallel_size={actor_tp}",
        f"actor.megatron.pipeline_model_parallel_size={pp}",
        f"rollout.tensor_model_parallel_size={rollout_tp}",
        "rollout.max_model_len=1024",
    )
    check_model(config, replace(MODEL, kv_heads={1: 3, 2: 2, 4: 1}[rollout_tp]))
