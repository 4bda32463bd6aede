"""1 when the answer is mathematically the gold answer, else 0.

Plain numbers are compared here, exactly. Everything else goes to a grading process (`math_compare.py`), because an
answer may take for ever or all memory to simplify.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig, Section
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.answer import boxed_answer, marked_answer
from grpo_mlm.rewards.base import invalid, read_options, require_answers
from grpo_mlm.rewards.math_text import Reading, plain_words, read_answer
from grpo_mlm.rewards.math_units import units_differ
from grpo_mlm.rewards.types import RewardResult, RewardSample
from grpo_mlm.rewards.worker_pool import GradingError, WorkerPool

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt

log = logging.getLogger(__name__)

# The rule of math_compare.py for decimals, here for plain numbers.
ABSOLUTE, RELATIVE = Fraction(1, 2_000_000), Fraction(2, 1_000_000)


class MathOptions(Section):
    require_boxed: bool = True
    """Only what stands in a box counts; without one the answer scores 0 and is counted as `no_answer`. When false,
    `answer is ...`, `#### ...` or the last line count too."""


class MathReward:
    """Owns the grading processes."""

    def __init__(self, function: RewardFunctionConfig, config: RewardConfig):
        self._options = read_options(MathOptions, function.kwargs, "math")
        self._pool = WorkerPool("grpo_mlm.rewards.math_compare:handle", config.num_workers, config.timeout_s)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Reports golds that cannot be read: such rows give invalid samples. UserError when no row is left."""
        require_answers(prompts, "math")
        problems = self._gold_problems({str(prompt.answer) for prompt in prompts})
        bad = [prompt for prompt in prompts if str(prompt.answer) in problems]
        if not bad:
            return
        first = "; ".join(
            f"row {p.row_index + 1} of {p.data_source}: {str(p.answer)[:80]!r} ({problems[str(p.answer)]})"
            for p in bad[:3]
        )
        report = f"math: {len(bad)} of {len(prompts)} gold answers cannot be read as mathematics: {first}"
        if len(bad) == len(prompts):
            raise UserError(f"{report}; use exact_match or a reward of your own for answers that are texts")
        log.warning("%s; their samples will be invalid", report)

    async def score(self, sample: RewardSample) -> RewardResult:
        gold = read_gold(str(sample.answer))
        if gold.problem:
            return invalid("unparseable_gold", f"{str(sample.answer)[:80]!r}: {gold.problem}")
        extract = boxed_answer if self._options.require_boxed else marked_answer
        answer = extract(sample.response)
        if not answer:
            return RewardResult(0.0, {"no_answer": 1.0}, reason="no_answer")
        prediction = read_answer(answer)
        equal, seconds = quick_verdict(gold, prediction), 0.0
        if equal is None:
            try:
                verdict, seconds = await self._pool.ask({"gold": gold.latex, "prediction": prediction.latex})
            except GradingError as error:
                return invalid(error.kind, f"math: {error} (answer {answer[:80]!r})", error.seconds)
            if not verdict["gold_parses"]:
                return invalid("unparseable_gold", repr(str(sample.answer)[:80]), seconds)
            equal = verdict["equal"]
        return RewardResult(float(equal), {"no_answer": 0.0}, seconds=seconds)

    def close(self) -> None:
        self._pool.close()

    def _gold_problems(self, answers: set[str]) -> dict[str, str]:
        """Of each gold that cannot be read, why."""
        readings = {answer: read_gold(answer) for answer in answers}
        problems = {answer: r.problem for answer, r in readings.items() if r.problem}
        latex = {
            a: r.latex for a, r in readings.items() if not r.problem and r.number is None and r.words is None
        }
        for answer, verdict in zip(
            latex, self._pool.map({"gold": text} for text in latex.values()), strict=True
        ):
            if isinstance(verdict, GradingError):
                problems[answer] = str(verdict)
            elif not verdict["gold_parses"]:
                problems[answer] = "not LaTeX that the parser knows"
        return problems


@lru_cache(maxsize=4096)
def read_gold(answer: str) -> Reading:
    """The gold answer of a row: bare, boxed, or after the `####` of a worked solution."""
    boxed = boxed_answer(answer)
    return read_answer(answer.rpartition("####")[2] if boxed is None else boxed)


def quick_verdict(gold: Reading, prediction: Reading) -> bool | None:
    """What can be said without algebra: True, False, or None for "ask the parser"."""
    if gold.words is not None or prediction.words is not None:
        return plain_words(gold.source) == plain_words(prediction.source)
    if prediction.problem or units_differ(gold.unit, prediction.unit):
        return False
    if gold.number is not None and prediction.number is not None:
        same_name = not gold.name or not prediction.name or gold.name == prediction.name
        return same_name and same_number(gold, prediction)
    if gold.latex == prediction.latex:
        return True
    return None


def same_number(a: Reading, b: Reading) -> bool:
    """Exact equality, or to six decimals and six significant digits where one is written as a decimal."""
    x, y = _number(a), _number(b)
    difference, size = abs(x - y), max(abs(x), abs(y))
    close = difference <= ABSOLUTE and difference <= RELATIVE * size
    return bool(difference == 0 or ((a.inexact or b.inexact) and close))


def _number(reading: Reading) -> Any:
    assert reading.number is not None
    return reading.number
