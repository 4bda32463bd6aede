"""1 when the answer is the gold text, else 0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig, Section
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.answer import answer_text, final_text
from grpo_mlm.rewards.base import read_options, require_answers
from grpo_mlm.rewards.types import RewardResult, RewardSample

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt


class ExactMatchOptions(Section):
    pattern: str | None = None
    """Regular expression with one group; the group of its last match is the answer. Null: the last box's content
    where there is one, else the whole response."""
    ignore_case: bool = False
    """Compare without regard to case."""


class ExactMatchReward:
    """The answer, stripped, equals the gold answer, stripped."""

    def __init__(self, function: RewardFunctionConfig, _config: RewardConfig):
        self._options = read_options(ExactMatchOptions, function.kwargs, "exact_match")
        self._pattern = None
        if self._options.pattern is not None:
            try:
                self._pattern = re.compile(self._options.pattern, re.DOTALL)
            except re.error as error:
                raise UserError(f"exact_match: pattern={self._options.pattern!r}: {error}") from None
            if self._pattern.groups != 1:
                raise UserError(
                    f"exact_match: pattern={self._options.pattern!r} has {self._pattern.groups} groups; "
                    "put one pair of brackets around the answer, (?:...) around the rest"
                )

    def check(self, prompts: Sequence[Prompt]) -> None:
        require_answers(prompts, "exact_match")

    async def score(self, sample: RewardSample) -> RewardResult:
        answer = self._answer(sample.response)
        if answer is None:
            return RewardResult(0.0, {"no_answer": 1.0}, reason="no_answer")
        gold = str(sample.answer).strip()
        if self._options.ignore_case:
            answer, gold = answer.casefold(), gold.casefold()
        return RewardResult(float(answer == gold), {"no_answer": 0.0})

    def close(self) -> None:
        pass

    def _answer(self, response: str) -> str | None:
        if self._pattern is None:
            return answer_text(response)
        found = self._pattern.findall(final_text(response))
        return found[-1].strip() if found else None
