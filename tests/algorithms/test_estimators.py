"""Every advantage estimator against loops over the samples of each prompt, written from the papers."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest

from grpo_mlm.algorithms.advantages import ADVANTAGES, estimate_advantages
from grpo_mlm.algorithms.groups import Scored
from grpo_mlm.config.names import ADV_ESTIMATORS, GROUP_ESTIMATORS
from grpo_mlm.config.schema import AlgorithmConfig
from grpo_mlm.errors import UserError

EPS = 1e-6


def random_step(seed: int) -> Scored:
    """Ragged groups in random order, some equal, some with one valid sample or none."""
    rng = np.random.default_rng(seed)
    sizes = [2, 2, 3, 5, 8, 16, 64, 1][: rng.integers(4, 9)]
    group_id = rng.permutation(np.repeat(rng.permutation(1000)[: len(sizes)], sizes))
    n = len(group_id)
    rewards = rng.integers(0, 3, n) * 0.35
    rewards[group_id == group_id[0]] = 0.35
    valid = rng.random(n) > 0.2
    valid[group_id == group_id[-1]] = False
    first = rewards * rng.random(n)
    return Scored(
        rewards=np.where(valid, rewards, np.nan),
        group_id=group_id,
        valid=valid,
        response_lens=rng.integers(1, 50, n),
        parts={"a": first, "b": rng.integers(0, 2, n).astype(float), "unused": np.full(n, 9.0)},
        part_weights={"a": 1.0, "b": 0.5},
        baseline=np.where(rng.random(n) > 0.1, rng.random(n), np.nan),
    )


def groups(s: Scored) -> list[list[int]]:
    """Indices of the valid samples of each prompt."""
    return [[i for i in range(len(s.rewards)) if s.group_id[i] == q and s.valid[i]] for q in set(s.group_id)]


def over_groups(s: Scored, name: str, by_std: bool) -> dict[int, float]:
    out: dict[int, float] = {}
    for members in groups(s):
        r = {i: float(s.rewards[i]) for i in members}
        if len(members) < 2:
            continue
        mean = sum(r.values()) / len(r)
        scale = stdev(r.values()) + EPS if by_std else 1.0
        equal = max(r.values()) == min(r.values())
        lens = {i: int(s.response_lens[i]) for i in members}
        for i in members:
            others = [r[j] for j in members if j != i]
            weighted = sum(lens[j] * r[j] for j in members) / sum(lens.values())
            best = max(members, key=lambda j: (r[j], -j))
            gain = r[best] - max(r[j] for j in members if j != best)
            value = {
                "grpo": (r[i] - mean) / scale,
                "dr_grpo": r[i] - mean,
                "rloo": r[i] - sum(others) / len(others),
                "opo": r[i] - weighted,
                "grpo_passk": gain / scale if i == best else 0.0,
            }[name]
            out[i] = 0.0 if equal else value
    return out


@pytest.mark.parametrize("by_std", [True, False])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "grpo_passk"])
def test_estimators_over_groups(name: str, by_std: bool) -> None:
    for seed in range(6):
        s = random_step(seed)
        out = estimate_advantages(s, AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=by_std))
        want = over_groups(s, name, by_std)
        assert np.flatnonzero(out.trained).tolist() == sorted(want)
        np.testing.assert_allclose(out.values, [want.get(i, 0.0) for i in range(len(s.rewards))], atol=1e-9)


def whiten(values: dict[int, float], s: Scored) -> dict[int, float]:
    """Over tokens: each sample's value as often as its response has tokens."""
    tokens = [values[i] for i in values for _ in range(int(s.response_lens[i]))]
    mean, std = sum(tokens) / len(tokens), stdev(tokens)
    return {i: (value - mean) / (std + EPS) for i, value in values.items()}


def test_reinforce_plus_plus() -> None:
    for seed in range(4):
        s = random_step(seed)
        out = estimate_advantages(s, AlgorithmConfig(adv_estimator="reinforce_plus_plus"))
        want = whiten({i: float(s.rewards[i]) for i in np.flatnonzero(s.valid)}, s)
        assert np.array_equal(out.trained, s.valid)
        np.testing.assert_allclose(out.values, [want.get(i, 0.0) for i in range(len(s.rewards))], atol=1e-9)


def test_reinforce_plus_plus_with_baseline() -> None:
    """Groups of equal rewards keep advantage exactly 0, though the batch's mean moves the others."""
    for seed in range(4):
        s = random_step(seed)
        out = estimate_advantages(s, AlgorithmConfig(adv_estimator="reinforce_plus_plus_baseline"))
        centred = over_groups(s, "dr_grpo", False)
        want = whiten(centred, s)
        for members in groups(s):
            if len({float(s.rewards[i]) for i in members}) == 1:
                want |= dict.fromkeys(members, 0.0)
        assert np.flatnonzero(out.trained).tolist() == sorted(centred)
        np.testing.assert_allclose(
            out.values, [want.get(i, 0.0) if i in centred else 0.0 for i in range(len(s.rewards))], atol=1e-9
        )


def test_gdpo_normalises_each_component_by_itself() -> None:
    for seed in range(4):
        s = random_step(seed)
        total: dict[int, float] = {}
        for members in groups(s):
            if len(members) < 2:
                continue
            for name, weight in s.part_weights.items():
                values = [float(s.parts[name][i]) for i in members]
                mean, std = sum(values) / len(values), stdev(values)
                for i, value in zip(members, values, strict=True):
                    total[i] = total.get(i, 0.0) + weight * (value - mean) / (std + EPS)
        mean, std = sum(total.values()) / len(total), stdev(total.values())
        out = estimate_advantages(s, AlgorithmConfig(adv_estimator="gdpo"))
        want = [(total[i] - mean) / (std + EPS) if i in total else 0.0 for i in range(len(s.rewards))]
        np.testing.assert_allclose(out.values, want, atol=1e-8)


def test_gdpo_tells_mixes_apart_that_have_the_same_sum() -> None:
    """Rewards (1, 0) and (0, 1) have one sum; where few samples have the second component it counts for more."""
    parts = {"a": np.array([1.0, 1, 1, 0]), "b": np.array([0.0, 0, 0, 1])}
    s = Scored(np.ones(4), np.zeros(4), np.ones(4, bool), np.ones(4, int), parts, {"a": 1.0, "b": 2.0})
    out = estimate_advantages(s, AlgorithmConfig(adv_estimator="gdpo"))
    assert out.values[3] > 0 > out.values[0]
    with pytest.raises(UserError, match="no sample has the reward 'c'; there are a, b"):
        estimate_advantages(
            Scored(np.ones(4), np.zeros(4), np.ones(4, bool), np.ones(4, int), parts, {"c": 1.0}),
            AlgorithmConfig(adv_estimator="gdpo"),
        )


def test_remax_compares_with_the_greedy_response() -> None:
    s = random_step(3)
    assert s.baseline is not None
    out = estimate_advantages(s, AlgorithmConfig(adv_estimator="remax"))
    for i, value in enumerate(out.values):
        known = bool(s.valid[i]) and math.isfinite(s.baseline[i])
        assert out.trained[i] == known
        assert value == pytest.approx(s.rewards[i] - s.baseline[i] if known else 0.0)
    without = Scored(s.rewards, s.group_id, s.valid, s.response_lens)
    with pytest.raises(UserError, match="no rewards of greedy responses"):
        estimate_advantages(without, AlgorithmConfig(adv_estimator="remax"))


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_what_holds_for_all(name: str) -> None:
    """Permuted samples have permuted advantages; equal rewards give exactly 0; NaN stays out; nothing is no error."""
    config = AlgorithmConfig(adv_estimator=name)
    s = random_step(5)
    order = np.random.default_rng(0).permutation(len(s.rewards))
    assert s.baseline is not None
    shuffled = Scored(
        s.rewards[order], s.group_id[order], s.valid[order], s.response_lens[order],
        {k: v[order] for k, v in s.parts.items()}, s.part_weights, s.baseline[order],
    )  # fmt: skip
    if name != "grpo_passk":  # the first of equally good ones
        np.testing.assert_allclose(
            estimate_advantages(shuffled, config).values,
            estimate_advantages(s, config).values[order],
            atol=1e-9,
        )
    out = estimate_advantages(s, config)
    assert np.isfinite(out.values).all()
    assert (out.values[~out.trained] == 0).all()
    same = np.full(8, 0.35)
    equal = Scored(
        same, np.repeat([0, 1], 4), np.ones(8, bool), np.arange(1, 9), {"a": same}, {"a": 1.0}, same
    )
    assert (estimate_advantages(equal, config).values == 0).all()
    none = np.zeros(0)
    empty = Scored(none, none, none.astype(bool), none.astype(int), {"a": none}, {"a": 1.0}, none)
    assert len(estimate_advantages(empty, config).values) == 0


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_hundred_thousand_samples_take_no_loop_in_python(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vectorised: the number of lines of Python that run does not depend on the number of samples."""
    import sys

    def lines(n: int) -> int:
        rng = np.random.default_rng(0)
        rewards = rng.random(n)
        s = Scored(
            rewards,
            np.arange(n) // 8,
            np.ones(n, bool),
            rng.integers(1, 2000, n),
            {"a": rewards},
            {"a": 1.0},
            rewards,
        )
        count = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += 1
            return trace

        sys.settrace(trace)
        try:
            estimate_advantages(s, AlgorithmConfig(adv_estimator=name))
        finally:
            sys.settrace(None)
        return count

    assert lines(100_000) == lines(800)


def test_the_registry_and_the_configs_names_are_the_same() -> None:
    assert sorted(ADVANTAGES) == sorted(ADV_ESTIMATORS)
    for name in ADV_ESTIMATORS:  # those that need no second sample train on groups of one
        one = Scored(
            np.array([1.0, 0.0]), np.array([0, 1]), np.ones(2, bool), np.ones(2, int), {"a": np.ones(2)}, {"a": 1.0},
            np.zeros(2),
        )  # fmt: skip
        trained = estimate_advantages(one, AlgorithmConfig(adv_estimator=name)).trained.all()
        assert trained == (name not in GROUP_ESTIMATORS)


def test_the_users_own_estimator(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from grpo_mlm.algorithms.advantages import Advantages\n"
        "def double(scored, config):\n    return Advantages(2 * scored.rewards, scored.valid, {'mine/x': 1.0})\n"
        "def short(scored, config):\n    return Advantages(scored.rewards[:1], scored.valid, {})\n"
        "def wrong(scored, config):\n    return scored.rewards\n"
    )
    s = Scored(np.array([1.0, 3.0]), np.zeros(2), np.array([True, True]), np.ones(2, int))
    out = estimate_advantages(s, AlgorithmConfig(adv_estimator=f"{file}:double"))
    assert (out.values.tolist(), out.metrics) == ([2.0, 6.0], {"mine/x": 1.0})
    for name, said in (
        ("short", r"of 2 samples, all of them finite; got shapes \(1,\)"),
        ("wrong", "got ndarray"),
    ):
        with pytest.raises(UserError, match=said):
            estimate_advantages(s, AlgorithmConfig(adv_estimator=f"{file}:{name}"))
