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


HomePath = Annotated[Path, BeforeValidator(_as_path)]
"""A path on this machine; `~` is the home directory, `$NAME` is not replaced."""
HomeString = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or some other name; a leading `~` is the home directory."""
Strings = Annotated[list[str], BeforeValidator(_one_as_list)]
"""A list of strings; one string stands for a list of one."""
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
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the KL penalty inside the reward."""


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo", "dr_grpo"] = "grpo"
    """How rewards become advantages. `grpo`: within-group standardised; `dr_grpo`: centred only."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide `grpo` advantages by the group's standard deviation."""
    use_kl_in_reward: bool = False
    """Subtract the KL to the reference from the reward, but not in groups whose rewards are all equal; needs
    `algorithm.kl_ctrl.kl_coef`."""
    kl_penalty: KLType = "k1"
    """Estimator of the KL inside the reward."""
    kl_ctrl: KLControlConfig = KLControlConfig()
    """Controller of the KL inside the reward."""


class PolicyLossConfig(Section):
    loss_mode: Literal["vanilla"] = "vanilla"
    """Policy loss. `vanilla`: the clipped surrogate with asymmetric and dual clip."""


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
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Choice of policy loss."""
    clip_ratio_low: float = Field(0.2, ge=0, lt=1)
    """The ratio is clipped below at 1 - this."""
    clip_ratio_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this; greater than the low side is DAPO's clip-higher."""
    clip_ratio_c: float | None = Field(3.0, gt=1)
    """Dual clip: bound of the loss at negative advantages, in units of the advantage; null is off."""
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


class RewardConfig(Section):
    functions: list[RewardFunctionConfig] = Field(min_length=1)
    """Rewards; a sample's reward is their weighted sum."""
    num_workers: int = Field(2, ge=1)
    """Processes that grade math and reasoning-gym answers."""
    timeout_s: float = Field(10.0, gt=0, le=86400)
    """Longest time for one reward of one sample; past it the sample is invalid."""
    max_invalid_fraction: float = Field(0.5, gt=0, le=1)
    """Fraction of a step's samples that may be invalid before the run stops."""


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
