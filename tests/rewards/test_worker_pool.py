"""Hard time limits, replaced workers, no process left behind."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from grpo_mlm.errors import RunFailure
from grpo_mlm.rewards.worker_pool import GradingError, WorkerPool
from tests.rewards.conftest import make_sample, make_scorer, score_all

HANDLERS = "tests.rewards.handlers"


def ended(pid: int, seconds: float = 60.0) -> bool:
    """Whether a process, of whatever parent, ends in time."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watch], [], [], seconds)[0])
    finally:
        os.close(watch)


@pytest.mark.slow
def test_ten_endless_answers_do_not_exhaust_the_pool() -> None:
    """RWD-02: each is invalid, and the right answer that waits behind them is still right."""
    scorer = make_scorer("math", num_workers=2, timeout_s=1.0)
    endless = [rf"\boxed{{9^{{9^{{9^{{{i}}}}}}}}}" for i in range(5, 10)] + [
        rf"\boxed{{(x+y+z+w)^{{{n}}}}}" for n in range(400, 405)
    ]
    samples = [make_sample(text, "x+1") for text in endless] + [make_sample(r"\boxed{1+x}", "x+1")]
    started = time.monotonic()
    results = score_all(scorer, samples)
    scorer.close()
    assert [r.invalid for r in results] == [True] * 10 + [False]
    assert {r.reason.split(":")[0] for r in results[:10]} == {"timeout"}
    assert all(r.seconds >= 1.0 for r in results[:10])
    assert results[10].value == 1.0
    assert time.monotonic() - started < 60  # a hang, not a measurement


def test_any_thread_and_any_loop_may_score() -> None:
    """RWD-02: nothing depends on signals, which only the main thread has."""
    scorer = make_scorer("math", num_workers=1, timeout_s=60.0)
    values: list[float] = []

    def score() -> None:
        values.append(
            score_all(scorer, [make_sample(r"\boxed{1+x}", "x+1"), make_sample(r"\boxed{42}", "42")])[0].value
        )

    threads = [threading.Thread(target=score) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    score()
    scorer.close()
    assert values == [1.0] * 4


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> WorkerPool:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2]), *sys.path])
    return WorkerPool(f"{HANDLERS}:answer", size=1, timeout_s=30.0)


def ask(pool: WorkerPool, **task: object) -> object:
    return asyncio.run(pool.ask(task))[0]


def test_a_worker_that_dies_or_fails_costs_one_task(pool: WorkerPool) -> None:
    first = ask(pool, do="pid")
    with pytest.raises(GradingError, match="ended with status") as died:
        ask(pool, do="die")
    assert died.value.kind == "died"
    second = ask(pool, do="pid")
    assert second != first
    with pytest.raises(GradingError, match="ZeroDivisionError") as failed:
        ask(pool, do="raise")
    assert failed.value.kind == "grading_error"
    with pytest.raises(GradingError, match="MemoryError"):
        ask(pool, do="eat memory")
    assert ask(pool, do="print") == "printed"
    assert ask(pool, do="pid") == second
    pool.close()
    assert ended(int(str(second)))


@pytest.mark.parametrize("do", ["write a file", "start a program", "connect"])
def test_a_worker_may_not_touch_the_world(pool: WorkerPool, tmp_path: Path, do: str) -> None:
    """SEC-01: should a grader ever execute what it reads, there is little it can do."""
    with pytest.raises(GradingError, match="not allowed in a grading process"):
        ask(pool, do=do, path=str(tmp_path / "mark"))
    pool.close()
    assert not (tmp_path / "mark").exists()


def test_close_ends_a_busy_worker_and_its_task(pool: WorkerPool) -> None:
    pid = int(str(ask(pool, do="pid")))

    async def close_while_busy() -> None:
        task = asyncio.create_task(pool.ask({"do": "loop"}))
        await asyncio.sleep(0)  # lets the task start
        await asyncio.to_thread(pool.close)
        with pytest.raises((GradingError, asyncio.CancelledError)):
            await task

    asyncio.run(close_while_busy())
    assert ended(pid)


def test_a_handler_that_does_not_import_is_a_failure_at_once() -> None:
    pool = WorkerPool("grpo_mlm.rewards.there_is_none:handle", size=1, timeout_s=5.0)
    with pytest.raises(RunFailure, match="there_is_none"):
        pool.map([{}])
    pool.close()


PARENT = """
import sys, threading
from grpo_mlm.rewards.worker_pool import WorkerPool
pool = WorkerPool("tests.rewards.handlers:answer", size=2, timeout_s=2.0)
threading.Thread(target=pool.map, args=([{"do": "loop"}],), daemon=True).start()
sys.stdin.readline()
print(pool.map([{"do": "pid"}])[0], flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_workers_end_when_their_parent_is_killed() -> None:
    """The idle one at once, the busy one by its limit on processor time."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stderr is not None
    busy = int(parent.stderr.readline())
    parent.stdin.write(b"\n")
    idle = int(parent.stdout.readline())
    assert busy != idle
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert ended(idle)
    assert ended(busy)
