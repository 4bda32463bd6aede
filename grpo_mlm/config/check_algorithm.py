"""Rules that span the keys of the algorithm: advantages, KL, aggregation, filters, corrections, the policy loss."""

from __future__ import annotations

from collections.abc import Iterator

from grpo_mlm.config.names import ADV_ESTIMATORS, GROUP_ESTIMATORS, LOSS_MODES, is_function
from grpo_mlm.config.schema import Config, FilterGroupsConfig, OverlongBufferConfig, Section
from grpo_mlm.config.suggest import did_you_mean

# Keys of actor and actor.policy_loss that some loss modes read; a key that is not here is for all.
_CLIPPED = ("vanilla", "gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl", "clip_cov")
_MODES_OF_KEY = {
    "clip_ratio_low": _CLIPPED,
    "clip_ratio_high": _CLIPPED,
    "clip_ratio_c": ("vanilla", "dppo_tv", "dppo_kl", "clip_cov"),
    "tau_pos": ("sapo",),
    "tau_neg": ("sapo",),
    "clip_cov_ratio": ("clip_cov",),
    "clip_cov_lb": ("clip_cov",),
    "clip_cov_ub": ("clip_cov",),
    "kl_cov_ratio": ("kl_cov",),
    "ppo_kl_coef": ("kl_cov",),
}


def _estimator(c: Config) -> Iterator[str]:
    name, n = c.algorithm.adv_estimator, c.rollout.n
    key = f"algorithm.adv_estimator={name}"
    if name not in ADV_ESTIMATORS and not is_function(name):
        yield _unknown(key, ADV_ESTIMATORS, name)
    if n == 1 and name in GROUP_ESTIMATORS:
        yield (
            f"rollout.n=1 with {key}: an advantage compares the samples of one prompt, and a group of one always "
            "gets 0; set rollout.n to 2 or more"
        )
    if (
        not c.algorithm.norm_adv_by_std_in_grpo
        and name not in ("grpo", "grpo_passk")
        and not is_function(name)
    ):
        yield (
            f"algorithm.norm_adv_by_std_in_grpo=false has no effect with {key}; drop it, or use grpo or grpo_passk"
        )
    if name == "gdpo" and c.algorithm.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward=true with {key}: it normalises each part of the reward, and the KL is none; "
            "use actor.use_kl_loss"
        )


def _kl(c: Config) -> Iterator[str]:
    loss, reward = c.actor.use_kl_loss, c.algorithm.use_kl_in_reward
    forms = (
        ("actor.use_kl_loss", loss, "actor.kl_loss_coef", c.actor.kl_loss_coef),
        ("algorithm.use_kl_in_reward", reward, "algorithm.kl_ctrl.kl_coef", c.algorithm.kl_ctrl.kl_coef),
    )
    for switch, on, key, coefficient in forms:
        if coefficient and not on:
            yield f"{key}={coefficient} has no effect with {switch}=false; set {switch}=true, or drop {key}"
        if on and not coefficient:
            yield f"{switch}=true with {key}=0 loads a reference that changes nothing; set {key}, or {switch}=false"
    if loss and reward:
        yield (
            "actor.use_kl_loss=true and algorithm.use_kl_in_reward=true charge the same KL twice; "
            "set one of them to false"
        )
    if loss and c.actor.kl_loss_type in ("k1", "kl"):
        yield (
            f"actor.kl_loss_type={c.actor.kl_loss_type} in the loss: its gradient ignores the reference; "
            f"use {c.actor.kl_loss_type}+ (the same value with k2's gradient) or k3"
        )
    if reward and c.algorithm.kl_penalty.endswith("+"):
        plain = c.algorithm.kl_penalty.removesuffix("+")
        yield (
            f"algorithm.kl_penalty={c.algorithm.kl_penalty}: the + changes only a gradient, and a reward has none; "
            f"use {plain}"
        )


def _kl_controller(c: Config) -> Iterator[str]:
    ctrl, prefix = c.algorithm.kl_ctrl, "algorithm.kl_ctrl"
    settings = {"target_kl": ctrl.target_kl, "horizon": ctrl.horizon}
    if ctrl.type == "adaptive":
        if not c.algorithm.use_kl_in_reward:
            yield (
                f"{prefix}.type=adaptive has no effect with algorithm.use_kl_in_reward=false: it steers the KL inside "
                "the reward; set the switch, or drop it"
            )
        for name, value in settings.items():
            if value is None:
                yield f"{prefix}.type=adaptive needs {prefix}.{name}"
    else:
        for name, value in settings.items():
            if value is not None:
                yield f"{prefix}.{name}={value} has no effect with {prefix}.type=fixed; use adaptive, or drop it"


def _aggregation(c: Config) -> Iterator[str]:
    mode, constant = c.actor.loss_agg_mode, c.actor.loss_scale_factor
    if mode == "seq-mean-token-sum-norm" and constant is None:
        yield (
            f"actor.loss_agg_mode={mode} needs actor.loss_scale_factor, the constant that it divides by "
            f"(Dr.GRPO: data.max_response_length, here {c.data.max_response_length})"
        )
    if mode != "seq-mean-token-sum-norm" and constant is not None:
        yield (
            f"actor.loss_scale_factor={constant} has no effect with actor.loss_agg_mode={mode}; "
            "drop it, or use seq-mean-token-sum-norm"
        )


def _filters(c: Config) -> Iterator[str]:
    filters, prefix = c.algorithm.filter_groups, "algorithm.filter_groups"
    yield from _switched_off(prefix, filters)
    if filters.enable and c.rollout.n == 1:
        yield f"{prefix}.enable=true with rollout.n=1: no group of one tells samples apart; raise rollout.n"
    if filters.mean_range is not None and filters.mean_range[0] > filters.mean_range[1]:
        yield f"{prefix}.mean_range={list(filters.mean_range)}: expected [low, high], low first"


def _overlong(c: Config) -> Iterator[str]:
    buffer, prefix = c.reward.overlong_buffer, "reward.overlong_buffer"
    if buffer.enable and buffer.len >= c.data.max_response_length:
        yield (
            f"{prefix}.len={buffer.len} is not less than data.max_response_length={c.data.max_response_length}: "
            "every response would be charged; lower it"
        )
    yield from _switched_off(prefix, buffer)


def _policy_loss(c: Config) -> Iterator[str]:
    mode = c.actor.policy_loss.loss_mode
    key = f"actor.policy_loss.loss_mode={mode}"
    if mode not in LOSS_MODES and not is_function(mode):
        yield _unknown(key, LOSS_MODES, mode)
    if mode not in LOSS_MODES:
        return
    for prefix, section in (("actor", c.actor), ("actor.policy_loss", c.actor.policy_loss)):
        for name, modes in _MODES_OF_KEY.items():
            if mode not in modes and _changed(section, name):
                yield (
                    f"{prefix}.{name}={getattr(section, name)} has no effect with {key}; "
                    f"drop it, or use {' or '.join(modes)}"
                )
    low, high = c.actor.policy_loss.clip_cov_lb, c.actor.policy_loss.clip_cov_ub
    if low >= high:
        yield f"actor.policy_loss.clip_cov_lb={low} is not below clip_cov_ub={high}; swap them"


def _switched_off(prefix: str, section: FilterGroupsConfig | OverlongBufferConfig) -> Iterator[str]:
    for name in type(section).model_fields:
        if not section.enable and name != "enable" and _changed(section, name):
            yield f"{prefix}.{name} has no effect with {prefix}.enable=false; set it to true, or drop {name}"


def _correction(c: Config) -> Iterator[str]:
    r, prefix = c.algorithm.rollout_correction, "algorithm.rollout_correction"
    lower, upper = r.rollout_is_threshold_lower, r.rollout_is_threshold
    if r.rollout_is is None:
        for name in ("rollout_is_mode", "rollout_is_threshold", "rollout_is_threshold_lower"):
            if _changed(r, name):
                yield f"{prefix}.{name} has no effect without {prefix}.rollout_is; set it, or drop {name}"
    elif lower is not None and lower >= upper:
        yield f"{prefix}.rollout_is_threshold_lower={lower} is not below rollout_is_threshold={upper}; swap them"
    rs, rs_lower, rs_upper = r.rollout_rs, r.rollout_rs_threshold_lower, r.rollout_rs_threshold
    if rs is None:
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower"):
            if _changed(r, name):
                yield f"{prefix}.{name} has no effect without {prefix}.rollout_rs; set it, or drop {name}"
    elif rs_upper is None:
        yield f"{prefix}.rollout_rs={rs} needs {prefix}.rollout_rs_threshold, the greatest value that is kept"
    elif rs_lower is not None and not rs.endswith("k1"):
        yield f"{prefix}.rollout_rs_threshold_lower={rs_lower} is for k1; {rs} is never negative: drop it"
    elif rs.endswith("k1") and (rs_lower or 1 / rs_upper) >= rs_upper:
        yield (
            f"{prefix}.rollout_rs_threshold={rs_upper} bounds a ratio from above and must exceed the lower bound "
            f"{rs_lower or 1 / rs_upper:g} (1 / threshold unless given)"
        )


def _changed(section: Section, name: str) -> bool:
    return (
        name in section.model_fields_set
        and getattr(section, name) != type(section).model_fields[name].default
    )


def _unknown(setting: str, known: tuple[str, ...], name: str) -> str:
    return (
        f"{setting}: expected {', '.join(known)}, module:function or path/to/file.py:function"
        + did_you_mean(name, known)
    )


ALGORITHM_RULES = (
    _estimator,
    _kl,
    _kl_controller,
    _aggregation,
    _filters,
    _overlong,
    _policy_loss,
    _correction,
)
"""Each takes a Config and yields a sentence for every broken rule."""
