"""What every reward has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from grpo_mlm.config.schema import Section
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.types import RewardResult, RewardSample

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt

Options = TypeVar("Options", bound=Section)


class Reward(Protocol):
    """One reward of a run."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Before the first step: UserError where a row lacks what this reward needs."""

    async def score(self, sample: RewardSample) -> RewardResult:
        """Judge one sample. Raises nothing: what cannot be judged is invalid."""

    def close(self) -> None:
        """Leave no process behind."""


def invalid(kind: str, detail: str, seconds: float = 0.0) -> RewardResult:
    """A sample that could not be judged; metrics count the kind, people read the detail."""
    return RewardResult(float("nan"), invalid=True, reason=f"{kind}: {detail}", seconds=seconds)


def read_options(model: type[Options], kwargs: dict[str, Any], reward: str) -> Options:
    """A built-in reward's `kwargs`, checked."""
    try:
        return model.model_validate(kwargs)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
        known = ", ".join(model.model_fields) or "none"
        raise UserError(
            f"reward.functions: kwargs of {reward}: {'; '.join(problems)}; known kwargs: {known}"
        ) from None


def require_answers(prompts: Sequence[Prompt], reward: str) -> None:
    """Every row has a gold answer that is a text or a number; UserError names the first row without."""
    for prompt in prompts:
        if isinstance(prompt.answer, bool | str | int | float) and str(prompt.answer).strip():
            continue
        raise UserError(
            f"the reward {reward} needs a gold answer (data.answer_key), a text or a number: "
            f"row {prompt.row_index + 1} of {prompt.data_source} has {prompt.answer!r}; "
            f"its columns are {sorted(prompt.row)}"
        )
