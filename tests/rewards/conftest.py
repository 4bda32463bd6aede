"""Samples and scorers for the tests of the rewards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig
from grpo_mlm.rewards.scorer import Scorer, build_scorer
from grpo_mlm.rewards.types import RewardResult, RewardSample

Score = Callable[..., RewardResult]


def make_sample(response: str, answer: Any = "", **fields: Any) -> RewardSample:
    defaults = {
        "prompt": "question",
        "row": {"answer": answer},
        "data_source": "test",
        "response_length": len(response),
        "finish_reason": "stop",
    }
    return RewardSample(response=response, answer=answer, **defaults | fields)


def make_scorer(*functions: str | dict[str, Any], **config: Any) -> Scorer:
    listed = [RewardFunctionConfig(**({"name": f} if isinstance(f, str) else f)) for f in functions]
    return build_scorer(RewardConfig(functions=listed, **config))


def score_all(scorer: Scorer, samples: list[RewardSample]) -> list[RewardResult]:
    async def gather() -> list[RewardResult]:
        return await asyncio.gather(*(scorer.score(sample) for sample in samples))

    return asyncio.run(gather())


def handled_unlocked(module: str, tasks: list[dict[str, str]]) -> list[Any]:
    """What `grpo_mlm.rewards.MODULE.handle` makes of the tasks, in a process of its own without the workers'
    lock-down, which would hide that text was executed."""
    code = (
        "import json, sys\n"
        f"from grpo_mlm.rewards.{module} import handle\n"
        "print(json.dumps([handle(task) for task in json.load(sys.stdin)]))\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, input=json.dumps(tasks), capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def math_scorer() -> Iterator[Scorer]:
    scorer = make_scorer("math", num_workers=1, timeout_s=60.0)
    yield scorer
    scorer.close()


@pytest.fixture
def score_math(math_scorer: Scorer) -> Score:
    """`score_math(gold, response)` through the public entry."""
    return lambda gold, response: score_all(math_scorer, [make_sample(response, gold)])[0]
