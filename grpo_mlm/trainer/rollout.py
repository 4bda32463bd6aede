"""The sampling phase: n requests a prompt, every finished sample scored while others still decode."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from grpo_mlm.cluster.engine_group import EngineGroup
from grpo_mlm.data.prompts import Prompt
from grpo_mlm.errors import RunFailure
from grpo_mlm.rewards.scorer import Scorer
from grpo_mlm.rewards.types import RewardSample
from grpo_mlm.rollout.request import Completion, Request, Sampling, request_seed
from grpo_mlm.trainer.assemble import Finished


def make_requests(prompts: dict[int, Prompt], n: int, run_seed: int, step: int) -> list[Request]:
    """`n` requests for each prompt instance, each with a seed of its own."""
    return [
        Request(group, i, prompt.token_ids, request_seed(run_seed, step, group, i))
        for group, prompt in prompts.items()
        for i in range(n)
    ]


def rollout(
    engines: EngineGroup,
    scorer: Scorer,
    prompts: dict[int, Prompt],
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Callable[[], None],
    timeout_s: float,
) -> tuple[list[Finished], float]:
    """Samples in request order, and the seconds of scoring that generation did not hide."""
    try:
        return asyncio.run(
            asyncio.wait_for(_rollout(engines, scorer, prompts, requests, sampling, progress), timeout_s)
        )
    except TimeoutError:
        raise RunFailure(f"gen: {len(requests)} samples were not finished within {timeout_s:.0f} s") from None


async def _rollout(
    engines: EngineGroup,
    scorer: Scorer,
    prompts: dict[int, Prompt],
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Callable[[], None],
) -> tuple[list[Finished], float]:
    scoring: dict[tuple[int, int], asyncio.Task[Finished]] = {}
    async for completion in engines.generate(requests, sampling):
        prompt = prompts[completion.group_id]
        key = (completion.group_id, completion.sample_index)
        scoring[key] = asyncio.create_task(_score(scorer, prompt, completion))
        progress()
    generated = time.perf_counter()
    await asyncio.gather(*scoring.values())
    missing = [r.request_id for r in requests if (r.group_id, r.sample_index) not in scoring]
    if missing:
        raise RunFailure(f"gen: {len(missing)} samples never came back, the first is {missing[0]}")
    ordered = [scoring[r.group_id, r.sample_index].result() for r in requests]
    return ordered, time.perf_counter() - generated


async def _score(scorer: Scorer, prompt: Prompt, completion: Completion) -> Finished:
    sample = RewardSample(
        prompt=prompt.text,
        response=completion.text,
        answer=prompt.answer,
        row=prompt.row,
        data_source=prompt.data_source,
        response_length=len(completion.token_ids),
        finish_reason=completion.finish_reason,
    )
    return Finished(completion.group_id, prompt, completion, await scorer.score(sample))
