"""The verdict of a reasoning-gym task's own verifier.

Verifiers run in grading processes: several of them evaluate the answer as an expression (`gym_verify.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig, Section
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.answer import answer_text
from grpo_mlm.rewards.base import invalid, read_options
from grpo_mlm.rewards.types import RewardResult, RewardSample
from grpo_mlm.rewards.worker_pool import GradingError, WorkerPool

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt


class ReasoningGymOptions(Section):
    only_correct: bool = False
    """Pay only right answers: a score below 1 (most verifiers give a little for a wrong answer) counts 0."""


class ReasoningGymReward:
    """Owns the grading processes. The answer is the last box's content, else the whole response."""

    def __init__(self, function: RewardFunctionConfig, config: RewardConfig):
        self._options = read_options(ReasoningGymOptions, function.kwargs, "reasoning_gym")
        self._pool = WorkerPool("grpo_mlm.rewards.gym_verify:handle", config.num_workers, config.timeout_s)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UserError for the first row that no reasoning-gym task made."""
        from reasoning_gym.factory import DATASETS

        for prompt in prompts:
            task = task_name(prompt.row, prompt.data_source)
            if not isinstance(prompt.row.get("metadata"), dict) or task not in DATASETS:
                raise UserError(
                    "the reward reasoning_gym scores rows of reasoning_gym:TASK sources only: "
                    f"row {prompt.row_index + 1} of {prompt.data_source} has the columns {sorted(prompt.row)} "
                    f"and the task {task!r}"
                )

    async def score(self, sample: RewardSample) -> RewardResult:
        entry = {
            "question": sample.row.get("question", sample.prompt),
            "answer": sample.answer,
            "metadata": sample.row["metadata"],
        }
        task = task_name(sample.row, sample.data_source)
        # As a Python literal, which keeps the tuples that some verifiers insist on.
        request = {"task": task, "entry": repr(_plain(entry)), "answer": answer_text(sample.response)}
        try:
            score, seconds = await self._pool.ask(request)
        except GradingError as error:
            return invalid(error.kind, f"reasoning_gym {task}: {error}", error.seconds)
        if self._options.only_correct:
            score = float(score >= 1.0)
        return RewardResult(float(score), seconds=seconds)

    def close(self) -> None:
        self._pool.close()


def _plain(value: Any) -> Any:
    """The same value of plain Python types: numpy's scalars and strings have no literal."""
    if isinstance(value, dict):
        return {_plain(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else tuple(map(_plain, value))
    return value.item() if hasattr(value, "item") else value


def task_name(row: dict[str, Any], data_source: str) -> str:
    """The task that made a row."""
    metadata = row.get("metadata")
    source = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    return source if isinstance(source, str) else data_source
