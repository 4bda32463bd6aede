"""Rules of the algorithm's keys: each broken one is named alone, with its settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from grpo_mlm.algorithms.grpo_loss import POLICY_LOSSES
from grpo_mlm.config import Config
from grpo_mlm.config.names import LOSS_MODES

Load = Callable[..., Config]
Refusal = Callable[..., str]

CORRECTION = "algorithm.rollout_correction"
BROKEN = {
    "unknown estimator": (
        ["algorithm.adv_estimator=gropo"],
        ["algorithm.adv_estimator=gropo", "remax", "did you mean grpo?"],
    ),
    "group of one": (["algorithm.adv_estimator=gdpo", "rollout.n=1"], ["rollout.n=1", "adv_estimator=gdpo"]),
    "std of an estimator without": (
        ["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"],
        ["norm_adv_by_std_in_grpo=false has no effect", "adv_estimator=rloo"],
    ),
    "gdpo with the KL in the reward": (
        ["algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1"],
        ["use_kl_in_reward=true", "adv_estimator=gdpo"],
    ),
    "adaptive without a target": (
        [
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl={kl_coef: 0.1, type: adaptive, horizon: 100}",
        ],
        ["kl_ctrl.type=adaptive needs algorithm.kl_ctrl.target_kl"],
    ),
    "a target for a fixed weight": (
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={kl_coef: 0.1, target_kl: 0.1}"],
        ["kl_ctrl.target_kl=0.1 has no effect"],
    ),
    "filter off but set": (
        ["algorithm.filter_groups.mean_range=[0.1, 0.9]"],
        ["filter_groups.mean_range has no effect", "enable=false"],
    ),
    "filter range reversed": (
        ["algorithm.filter_groups={enable: true, mean_range: [0.9, 0.1]}"],
        ["mean_range=[0.9, 0.1]", "low first"],
    ),
    "filter of groups of one": (
        ["algorithm.adv_estimator=remax", "rollout.n=1", "algorithm.filter_groups.enable=true"],
        ["filter_groups.enable=true", "rollout.n=1"],
    ),
    "overlong buffer as long as a response": (
        ["reward.overlong_buffer={enable: true, len: 512}", "data.max_response_length=512"],
        ["overlong_buffer.len=512", "max_response_length=512"],
    ),
    "overlong buffer off but set": (
        ["reward.overlong_buffer.penalty_factor=0.5"],
        ["overlong_buffer.penalty_factor has no effect"],
    ),
    "unknown loss": (
        ["actor.policy_loss.loss_mode=gsop"],
        ["actor.policy_loss.loss_mode=gsop", "cispo", "did you mean gspo?"],
    ),
    "key of another loss": (
        ["actor.policy_loss.tau_pos=2.0"],
        ["actor.policy_loss.tau_pos=2.0 has no effect", "loss_mode=vanilla", "sapo"],
    ),
    "clip of a loss that clips nothing": (
        ["actor.policy_loss.loss_mode=sapo", "actor.clip_ratio_high=0.3"],
        ["actor.clip_ratio_high=0.3 has no effect", "loss_mode=sapo"],
    ),
    "covariances reversed": (
        ["actor.policy_loss={loss_mode: clip_cov, clip_cov_lb: 5.0, clip_cov_ub: 1.0}"],
        ["clip_cov_lb=5.0", "clip_cov_ub=1.0"],
    ),
    "thresholds without importance weights": (
        [f"{CORRECTION}.rollout_is_threshold=3.0"],
        ["rollout_is_threshold has no effect"],
    ),
    "thresholds of weights reversed": (
        [f"{CORRECTION}={{rollout_is: token, rollout_is_threshold: 0.5, rollout_is_threshold_lower: 0.9}}"],
        ["rollout_is_threshold_lower=0.9", "rollout_is_threshold=0.5"],
    ),
    "threshold without a rejection": (
        [f"{CORRECTION}.rollout_rs_threshold=3.0"],
        ["rollout_rs_threshold has no effect"],
    ),
    "rejection without a threshold": (
        [f"{CORRECTION}.rollout_rs=token_k3"],
        ["rollout_rs=token_k3 needs", "rollout_rs_threshold"],
    ),
    "lower bound of what is never negative": (
        [
            f"{CORRECTION}={{rollout_rs: seq_sum_k3, rollout_rs_threshold: 1.0, rollout_rs_threshold_lower: 0.1}}"
        ],
        ["rollout_rs_threshold_lower=0.1", "k1"],
    ),
    "ratio bound below one": (
        [f"{CORRECTION}={{rollout_rs: token_k1, rollout_rs_threshold: 0.5}}"],
        ["rollout_rs_threshold=0.5", "lower bound 2"],
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_rule_is_named_alone_with_its_settings(refusal: Refusal, case: str) -> None:
    overrides, named = BROKEN[case]
    said = refusal(*overrides)
    assert "problems" not in said, said
    for text in named:
        assert text in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=remax", "rollout.n=1"],
        ["algorithm.adv_estimator=my.module:estimator", "algorithm.norm_adv_by_std_in_grpo=false"],
        ["algorithm.adv_estimator=grpo_passk", "algorithm.norm_adv_by_std_in_grpo=false"],
        ["actor.policy_loss.loss_mode=./mine.py:loss", "actor.clip_ratio_high=0.3"],
        ["actor.policy_loss.loss_mode=gspo", "actor.clip_ratio_low=0.0003"],
        ["algorithm.filter_groups={enable: true, mean_range: [0.1, 0.9], metric: exact_match}"],
        [
            f"{CORRECTION}={{mode: bypass, rollout_is: sequence, rollout_rs: token_k1, rollout_rs_threshold: 2.0}}"
        ],
        ["reward.overlong_buffer={enable: true, len: 64}"],
    ],
)
def test_what_is_right_passes_and_comes_back_from_a_file(
    load: Load, overrides: list[str], tmp_path: object
) -> None:
    from pathlib import Path

    from grpo_mlm.config import dump_config, load_config

    config = load(*overrides)
    path = Path(str(tmp_path)) / "again.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


def test_the_names_are_those_of_the_registry() -> None:
    assert sorted(LOSS_MODES) == sorted(POLICY_LOSSES)
