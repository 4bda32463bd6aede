"""Every key of a run's configuration, one line of documentation under each.

Reading this file is reading the manual. It imports neither torch nor ray nor vllm, so a login node can
check a config. `load.py` reads YAML into it, `check.py` holds the rules that span several fields.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

KLType = Literal[
    "k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k2+", "mse+", "k3+", "low_var_kl+"
]  # fmt: skip
LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
DType = Literal["float32", "bfloat16"]


def _one_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _as_path(value: Any) -> Any:
    return Path(os.path.expanduser(value)) if isinstance(value, str) else value


def _as_pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


HomePath = Annotated[Path, BeforeValidator(_as_path)]
"""A path on this machine; `~` is the home directory, `$NAME` is not replaced."""
HomeString = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or some other name; a leading `~` is the home directory."""
Strings = Annotated[list[str], BeforeValidator(_one_as_list)]
"""A list of strings; one string stands for a list of one."""
Range = Annotated[tuple[float, float], BeforeValidator(_as_pair)]
"""Two numbers, `[low, high]`."""
Sources = Annotated[list[HomeString], BeforeValidator(_one_as_list)]
"""The same, of places to read from."""


class Section(BaseModel):
    """A group of keys: unknown keys are errors, nothing is converted, values never change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class RunConfig(Section):
    name: str = "grpo"
    """Names the run directory, `runs/NAME-DATE-TIME`, unless `run.dir` is given."""
    dir: HomePath | None = None
    """Run directory. One that already holds a run is refused, so nothing is overwritten."""
    seed: int = Field(0, ge=0)
    """Seeds the prompt order and, hashed with step, prompt and sample index, every rollout request."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Accelerator of trainer and engines; `auto` is cuda where a GPU is visible, else cpu."""
    address: str | None = None
    """Address of a running Ray cluster (`auto` finds it); null starts one for this run alone."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """Whether actor and rollout engines share devices in turns, or each have their own. Sharing, an engine gives up its
    memory (weights and KV cache, on GPUs) from the end of the sampling to the next weight sync."""
    nnodes: int = Field(1, ge=1)
    """Number of nodes."""
    n_devices_per_node: int | None = Field(None, ge=1)
    """Devices used on each node; null is every visible GPU, and on a CPU as many as the layout asks for."""
    threads_per_worker: int = Field(1, ge=1)
    """CPU threads of each trainer process and each engine (CPU runs only)."""
    start_timeout_s: float = Field(600, gt=0)
    """Longest wait for processes, engines and their process groups to come up."""
    call_timeout_s: float = Field(3600, gt=0)
    """Longest wait for any one phase of a step; past it the run ends with the phase's name."""


class ModelConfig(Section):
    path: HomeString
    """Folder in Hugging Face format, or a hub id."""
    maker: str | None = None
    """`module:function` called with the folder when `path` does not exist yet (small models made on first use)."""
    trust_remote_code: bool = False
    """Whether code inside the model folder may run. Leave it off unless you wrote the folder."""


class DataConfig(Section):
    train_files: Sources = Field(min_length=1)
    """Training sources: `.jsonl` or `.parquet` paths (relative to where the command runs), or
    `reasoning_gym:TASK?size=N&seed=S&key=value`."""
    val_files: Sources = []
    """Validation sources, the same forms; every row counts once."""
    train_batch_size: int = Field(256, ge=1)
    """Prompts per step; each is sampled `rollout.n` times."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Column with the gold answer that rule-based rewards compare with."""
    source_key: str = "data_source"
    """Optional column that names a row's origin; metrics are also split by it. Default: the file's name."""
    system_prompt: str | None = None
    """Put before every prompt as a system message, where the row has none of its own."""
    apply_chat_template: bool = True
    """Render prompts with the tokenizer's chat template; false sends string prompts as they are."""
    chat_template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, for example `enable_thinking: false`."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens, counted after the template, on the ids that are sent."""
    max_response_length: int = Field(512, ge=1)
    """Longest response in tokens; the engine stops there."""
    truncation: Literal["error", "drop", "left"] = "error"
    """What happens to a longer prompt: stop, drop and count it, or cut its oldest content and keep the
    generation prompt."""
    shuffle: bool = True
    """Shuffle the training rows anew each epoch."""


class KLControlConfig(Section):
    type: Literal["fixed", "adaptive"] = "fixed"
    """Whether the weight stays, or follows the measured KL towards `target_kl`."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty inside the reward; with `adaptive`, the one to begin with."""
    target_kl: float | None = Field(None, gt=0)
    """KL a token, in nats, at which the adaptive weight rests."""
    horizon: int | None = Field(None, ge=1)
    """Samples over which the adaptive weight takes effect; more is slower."""


class FilterGroupsConfig(Section):
    enable: bool = False
    """Dynamic sampling: train on groups that tell samples apart only, and sample more prompts until
    `data.train_batch_size` of them are found."""
    metric: str = "reward"
    """What must differ inside a group: `reward`, or a part of it by name."""
    mean_range: Range | None = None
    """Keep only groups whose mean of `metric` lies in this range, ends included; null is any."""
    max_num_gen_batches: int = Field(10, ge=1)
    """Batches of prompts that a step may sample; when they did not give enough groups the run stops."""


class RolloutCorrectionConfig(Section):
    mode: Literal["decoupled", "bypass"] = "decoupled"
    """Whose log-probs the ratio of the loss is taken against. `decoupled`: the trainer's before the step; sampler
    and trainer are compared once, before it. `bypass`: the sampler's own, which saves a forward pass; they are
    compared inside the loss, under the weights of the moment."""
    rollout_is: Literal["token", "sequence", "geometric"] | None = None
    """Importance weights from sampler to trainer: of each token, the product over its sample, or that one's geometric
    mean; null is none."""
    rollout_is_mode: Literal["truncate", "mask"] = "truncate"
    """What happens to weights outside of the thresholds: bounded by them, or 0."""
    rollout_is_threshold: float = Field(2.0, gt=0)
    """Upper threshold of the weights."""
    rollout_is_threshold_lower: float | None = Field(None, gt=0)
    """Lower threshold of the weights; null is none."""
    rollout_rs: (
        Literal[
            "token_k1", "token_k2", "token_k3",
            "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
            "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
        ] | None
    ) = None  # fmt: skip
    """Leave tokens, or whole samples, out of the loss where sampler and trainer differ too much by this measure."""
    rollout_rs_threshold: float | None = Field(None, gt=0)
    """Greatest value that is kept; for k1 of exp(k1), the ratio."""
    rollout_rs_threshold_lower: float | None = Field(None, gt=0)
    """Least ratio that is kept (k1 only); null is 1 / `rollout_rs_threshold`."""

    @property
    def active(self) -> bool:
        """Whether it changes the loss."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def over_samples(self) -> bool:
        """Whether it looks at whole samples."""
        return self.rollout_is in ("sequence", "geometric") or (self.rollout_rs or "").startswith("seq")


class AlgorithmConfig(Section):
    adv_estimator: str = "grpo"
    """How rewards become advantages: `grpo`, `dr_grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`,
    `grpo_passk`, `gdpo`, `opo`, `remax`, or your own `module:function` or `path/to/file.py:function`."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide advantages of `grpo` and `grpo_passk` by the group's standard deviation."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Dynamic sampling."""
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """What is done about the difference between sampler and trainer."""
    mask_truncated_completions: bool = False
    """Leave responses that were cut at the length limit out of the loss and its denominators; they stay in their
    group's statistics."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward, but not in groups whose rewards are all equal; needs
    `algorithm.kl_ctrl.kl_coef`."""
    kl_penalty: KLType = "k1"
    """Estimator of the KL inside the reward."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Controller of the KL inside the reward."""


class PolicyLossConfig(Section):
    loss_mode: str = "vanilla"
    """Policy loss: `vanilla` (the clipped surrogate with asymmetric and dual clip), `gspo`, `cispo`, `sapo`,
    `geo_mean`, `dppo_tv`, `dppo_kl`, `clip_cov`, `kl_cov`, or your own `module:function` or
    `path/to/file.py:function`."""
    tau_pos: float = Field(1.0, gt=0)
    """`sapo`: temperature of the gate at positive advantages."""
    tau_neg: float = Field(1.05, gt=0)
    """`sapo`: temperature of the gate at the others."""
    clip_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """`clip_cov`: share of all tokens that lose their gradient."""
    clip_cov_lb: float = 1.0
    """`clip_cov`: covariance above which a token may be chosen."""
    clip_cov_ub: float = 5.0
    """`clip_cov`: covariance below which a token may be chosen."""
    kl_cov_ratio: float = Field(2e-4, gt=0, le=1)
    """`kl_cov`: share of all tokens, those of the greatest covariance, that pay for leaving the old policy."""
    ppo_kl_coef: float = Field(1.0, gt=0)
    """`kl_cov`: what they pay for each nat."""


class OptimConfig(Section):
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate of Adam."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from zero."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay; norms and biases are exempt."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first-moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second-moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    clip_grad: float = Field(1.0, gt=0)
    """Gradient norm over all parameters above which gradients are scaled down."""


class MegatronConfig(Section):
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = Field(1, ge=1)
    """Ranks that share the stack of layers."""
    data_parallel_size: int | None = Field(None, ge=1)
    """Model replicas; null is every device left over (one on a CPU)."""
    use_distributed_optimizer: bool = True
    """Shard optimizer state and fp32 master weights over the data-parallel ranks."""


class ActorConfig(Section):
    dtype: DType = "bfloat16"
    """Weights and activations; bfloat16 keeps fp32 master weights and reduces gradients in fp32."""
    ppo_mini_batch_size: int | None = Field(None, ge=1)
    """Prompts per optimizer step; null is the whole batch (`data.train_batch_size`)."""
    ppo_epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    max_tokens_per_gpu: int = Field(16384, ge=1)
    """Token budget of a packed micro-batch; it must hold one sample of the greatest length."""
    logits_chunk_mb: int = Field(256, ge=1)
    """Memory for the chunk of logits that exists at any time, in MiB."""
    loss_backend: Literal["auto", "reference", "chunked"] = "auto"
    """Implementation of the head and loss: `chunked` makes a chunk of logits at a time, in plain torch, and is what
    `auto` takes; `reference` makes all logits at once."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Choice of policy loss."""
    clip_ratio_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - this; in `geo_mean` the log-ratio at this, in `dppo_*` a threshold."""
    clip_ratio_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this; greater than the low side is DAPO's clip-higher. In `geo_mean` the
    log-ratio, in `dppo_*` a threshold."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: bound of the loss at negative advantages, in units of the advantage; in `dppo_*` bound of the ratio;
    null is off."""
    loss_agg_mode: LossAggMode = "token-mean"
    """How per-token losses become one number; denominators are those of the whole optimizer step."""
    loss_scale_factor: float | None = Field(None, gt=0)
    """The constant of `seq-mean-token-sum-norm` (Dr.GRPO: the greatest response length)."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss; needs `actor.kl_loss_coef`."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL term in the loss."""
    kl_loss_type: KLType = "k3"
    """Estimator of the KL term in the loss; k1 needs its `+` form, its plain gradient ignores the reference."""
    entropy_coeff: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    max_skipped_steps: int = Field(3, ge=1)
    """Optimizer steps in a row that a non-finite loss or gradient may skip before the run stops."""
    optim: OptimConfig = OptimConfig()
    """Optimizer."""
    megatron: MegatronConfig = MegatronConfig()
    """Parallel layout."""


class ValidationSamplingConfig(Section):
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of validation; 0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass of validation."""
    top_k: int = Field(-1, ge=-1)
    """Candidates kept in validation; -1 is all."""
    n: int = Field(1, ge=1)
    """Samples per validation row; the metric is their mean."""


class RolloutConfig(Section):
    n: int = Field(8, ge=1)
    """Samples per prompt (the group size)."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; the trainer's log-probs are taken at the same one."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 in training: log-probs of a truncated distribution are not the trainer's."""
    top_k: int = Field(-1, ge=-1)
    """Must be -1 in training, for the same reason."""
    stop: Strings = []
    """Strings that end a response; the matched text stays, in text and in ids."""
    num_engines: int | None = Field(None, ge=1)
    """vLLM engines; null is every device left over (one on a CPU)."""
    tensor_model_parallel_size: int = Field(1, ge=1)
    """Ranks of each engine."""
    dtype: DType | None = None
    """Engine's precision; null is `actor.dtype`."""
    max_model_len: int | None = Field(None, ge=1)
    """Engine's context; null is the prompt limit plus the response limit."""
    max_num_seqs: int = Field(256, ge=1)
    """Requests that one engine decodes at a time."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Token budget of an engine step; null lets the engine choose."""
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """Share of a GPU's memory for weights and KV cache (CUDA only)."""
    kv_cache_gb: float = Field(0.5, gt=0)
    """KV cache of an engine rank in GiB (CPU only)."""
    enforce_eager: bool = False
    """Skip CUDA graphs and compilation (always skipped on a CPU)."""
    enable_prefix_caching: bool = True
    """Compute the prompt's cache once for the samples of a group."""
    val_kwargs: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling of validation."""


class RewardFunctionConfig(Section):
    name: str
    """`exact_match`, `math`, `reasoning_gym`, or your own `module:function` or `path/to/file.py:function`."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    kwargs: dict[str, Any] = {}
    """Extra keyword arguments of the reward."""


class OverlongBufferConfig(Section):
    enable: bool = False
    """Charge responses that come near the length limit (DAPO's soft overlong punishment)."""
    len: int = Field(4096, ge=1)
    """Tokens before `data.max_response_length` over which the penalty rises from zero."""
    penalty_factor: float = Field(1.0, gt=0)
    """Penalty at the limit, taken off the reward."""


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(min_length=1)
    """Rewards; a sample's reward is their weighted sum."""
    num_workers: int = Field(2, ge=1)
    """Processes that grade math and reasoning-gym answers."""
    timeout_s: float = Field(10.0, gt=0, le=86400)
    """Longest time for one reward of one sample; past it the sample is invalid."""
    max_invalid_fraction: float = Field(0.5, gt=0, le=1)
    """Fraction of a step's samples that may be invalid before the run stops."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()
    """Length penalty, in training only; it is the reward part `overlong`."""


class BridgeConfig(Section):
    bucket_mb: int = Field(256, ge=1)
    """Size of the buckets in which weights travel from trainer to engines, in MiB; colocated, two of them a device."""
    verify: Literal["off", "sample", "full"] = "sample"
    """Checksums of the pieces that travel: none, one piece in 16 (other ones at each sync), or all."""


class DebugConfig(Section):
    save_rollouts: HomePath | None = None
    """Folder to which every step's batch is saved, as `step_N.safetensors`."""
    load_rollouts: HomePath | None = None
    """One such file: each step trains on it and no engine is started."""


class TrainerConfig(Section):
    total_epochs: int = Field(1, ge=1)
    """Passes over the training rows."""
    total_training_steps: int | None = Field(None, ge=1)
    """Steps to run; null is as many as the epochs give."""
    val_before_train: bool = True
    """Validate once before the first step."""
    test_freq: int = Field(-1, ge=-1)
    """Validate every so many steps and after the last; -1 never."""
    save_freq: int = Field(-1, ge=-1)
    """Write the weights as a Hugging Face folder every so many steps and after the last; -1 never."""
    logger: Annotated[list[Literal["console", "tensorboard"]], BeforeValidator(_one_as_list)] = [
        "console",
        "tensorboard",
    ]
    """Where metrics go besides `metrics.jsonl`."""
    log_samples: int = Field(3, ge=0)
    """Sample completions shown on the console after a step."""
    debug: DebugConfig = DebugConfig()
    """Replay of saved batches."""


class Config(Section):
    """One run: `grpo-mlm train CONFIG.yaml key=value ...`."""

    run: RunConfig = RunConfig()
    """The run itself."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices and processes."""
    model: ModelConfig
    """The language model."""
    data: DataConfig
    """Prompts."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """From rewards to advantages."""
    actor: ActorConfig = ActorConfig()
    """The trained policy."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig
    """Scoring."""
    bridge: BridgeConfig = BridgeConfig()
    """Weights from trainer to engines."""
    trainer: TrainerConfig = TrainerConfig()
    """The loop."""

    @property
    def mini_batch_size(self) -> int:
        """Prompts per optimizer step."""
        return self.actor.ppo_mini_batch_size or self.data.train_batch_size
