"""Rewards of the user's own: a function of one sample."""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_mlm.config.functions import load_function
from grpo_mlm.config.schema import RewardConfig, RewardFunctionConfig
from grpo_mlm.errors import UserError
from grpo_mlm.rewards.base import invalid
from grpo_mlm.rewards.types import RewardResult, RewardSample

if TYPE_CHECKING:
    from grpo_mlm.data.prompts import Prompt

# Calls of one plain function that run at a time: enough to hide waiting, few enough to be cheap.
CONCURRENT_CALLS = 64


class FunctionReward:
    """`def reward(sample: RewardSample, **kwargs) -> float | dict | RewardResult`, plain or async.

    A dict has `score`, everything else in it is a part. A plain function runs in a thread of its own, so one that
    waits holds up no other sample; one that never returns costs its sample and a thread.
    """

    def __init__(self, function: RewardFunctionConfig, config: RewardConfig):
        self._spec = function.name
        self._function = load_function(function.name, "reward.functions")
        self._kwargs = function.kwargs
        self._timeout_s = config.timeout_s
        self._slots: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        try:
            signature = inspect.signature(self._function)
        except ValueError as error:  # a builtin such as dict
            raise UserError(f"reward.functions: {self._spec} is no function of one sample: {error}") from None
        try:
            signature.bind(None, **self._kwargs)
        except TypeError as error:
            raise UserError(
                f"reward.functions: {self._spec} cannot be called with (sample, kwargs {sorted(self._kwargs)}): "
                f"{error}; it has the signature {signature}"
            ) from None

    def check(self, prompts: Sequence[Prompt]) -> None:
        pass

    async def score(self, sample: RewardSample) -> RewardResult:
        started = time.perf_counter()
        limit = asyncio.timeout(None)
        try:
            async with self._slot():
                started = time.perf_counter()
                async with asyncio.timeout(self._timeout_s) as limit:
                    if inspect.iscoroutinefunction(self._function):
                        value = await self._function(sample, **self._kwargs)
                    else:
                        value = await self._in_thread(sample)
            return as_result(value, self._spec, time.perf_counter() - started)
        except (Exception, SystemExit) as error:  # whatever the user's function does costs this sample only
            seconds = time.perf_counter() - started
            if limit.expired():
                return invalid("timeout", f"{self._spec} took longer than {self._timeout_s:g} s", seconds)
            return invalid("raised", f"{self._spec}: {type(error).__name__}: {error}", seconds)

    def close(self) -> None:
        pass

    def _slot(self) -> asyncio.Semaphore:
        """The semaphore of the running loop: every step of a run has a loop of its own."""
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots[0] is not loop:
            self._slots = (loop, asyncio.Semaphore(CONCURRENT_CALLS))
        return self._slots[1]

    async def _in_thread(self, sample: RewardSample) -> Any:
        """A daemon thread, not a pool: one that hangs must block neither the other samples nor the exit."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

        def call() -> None:
            value, error = None, None
            try:
                value = self._function(sample, **self._kwargs)
            except BaseException as raised:  # a future takes neither SystemExit nor StopIteration
                plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
                error = raised if plain else RuntimeError(repr(raised))
            if not loop.is_closed():
                loop.call_soon_threadsafe(finish, value, error)

        threading.Thread(target=call, daemon=True, name=f"reward {self._spec}").start()
        return await done


def as_result(value: Any, spec: str, seconds: float) -> RewardResult:
    """What a user's function returned as a verdict; anything but finite numbers is an invalid sample."""
    parts: dict[str, Any] = {}
    result = value
    if isinstance(value, RewardResult):
        if value.invalid:
            return RewardResult(
                math.nan, dict(value.parts), True, value.reason or f"invalid: {spec} said so", seconds
            )
        result, parts, reason = value.value, value.parts, value.reason
    elif isinstance(value, dict) and "score" in value:
        result, parts, reason = value["score"], {k: v for k, v in value.items() if k != "score"}, ""
    else:
        reason = ""
    checked = {"score": result, **parts}
    for name, number in checked.items():
        if not _is_number(number):
            return invalid(
                "wrong_type",
                f"{spec} returned {_shown(value)}, where {name} is no number; "
                "expected one number, a dict with 'score', or a RewardResult, for the one sample it was given",
                seconds,
            )
        if not math.isfinite(number):
            return invalid("not_finite", f"{spec} returned {name}={number}", seconds)
    return RewardResult(float(result), {str(k): float(v) for k, v in parts.items()}, False, reason, seconds)


def _is_number(value: Any) -> bool:
    """Python and numpy numbers and booleans; no strings, no lists, no arrays, not even of length one."""
    return isinstance(value, numbers.Real) or type(value).__name__ in ("bool_", "bool")


def _shown(value: Any) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 120 else text[:117] + "..."
