"""What a reward sees and what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RewardSample:
    """One finished sample, as a reward sees it."""

    prompt: str  # rendered prompt text, with the chat template
    response: str
    answer: Any  # the row's gold answer
    row: dict[str, Any]  # the whole source row, untouched
    data_source: str
    response_length: int  # tokens
    finish_reason: str  # "stop" or "length"; a reward never sees a sample that was aborted


@dataclass(frozen=True)
class RewardResult:
    """A reward's verdict. `invalid` means "could not be judged", which is not the same as 0."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    invalid: bool = False
    reason: str = ""  # kind of failure, or a note such as "no_answer"
    seconds: float = 0.0
