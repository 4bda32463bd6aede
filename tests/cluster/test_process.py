"""Real Ray processes that answer, fail, die and hang; each end is one clear error."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_mlm.cluster.placement import Slot, ray_cluster, reserve
from grpo_mlm.cluster.process import Process, wait
from grpo_mlm.config.schema import ClusterConfig
from grpo_mlm.errors import RunFailure, UserError

pytestmark = pytest.mark.slow


class Target:
    """What runs in the process."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise ValueError(fail)

    def add(self, a: int, b: int) -> int:
        print(f"adding {a} and {b}", flush=True)
        return a + b

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def mistake(self) -> None:
        raise UserError("data.train_files: no such file")

    def crash(self) -> None:
        raise ZeroDivisionError("one over zero")

    def die(self) -> None:
        print("about to go", flush=True)
        os._exit(3)

    def hang(self) -> None:
        time.sleep(60)

    def count(self, n: int) -> Iterator[int]:
        yield from range(n)

    def count_then_die(self, n: int) -> Iterator[int]:
        yield from range(n)
        os._exit(3)


@pytest.fixture(scope="module")
def slots() -> Iterator[list[Slot]]:
    with ray_cluster(ClusterConfig(), "cpu", 2), reserve(2, "cpu", 60) as slots:
        yield slots


def start(slots: list[Slot], folder: Path, *args: str, env: dict[str, str] | None = None) -> Process:
    return Process("worker-0", "tests.cluster.test_process:Target", args, slots[0], env or {}, folder)


def ask(process: Process, method: str, *args: object, timeout: float = 60) -> object:
    return wait([process], [process.submit(method, *args)], "phase", timeout)[0]


def test_answers_and_prints_into_its_own_log(slots: list[Slot], tmp_path: Path) -> None:
    process = start(slots, tmp_path)
    assert ask(process, "add", 2, 3) == 5
    assert "adding 2 and 3" in (tmp_path / "worker-0.log").read_text()


def test_environment_values_arrive_whole(slots: list[Slot], tmp_path: Path) -> None:
    """LNC-04: spaces and quotes survive."""
    process = start(slots, tmp_path, env={"GRPO_TEST": "a 'b' \"c\""})
    assert ask(process, "env", "GRPO_TEST") == "a 'b' \"c\""


def test_a_users_mistake_stays_one(slots: list[Slot], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        ask(start(slots, tmp_path), "mistake")


def test_a_failure_names_process_phase_and_cause(slots: list[Slot], tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match=r"phase: worker-0 failed: ZeroDivisionError: one over zero"):
        ask(start(slots, tmp_path), "crash")


def test_a_failing_start_is_reported_with_its_cause(slots: list[Slot], tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="no weights here"):
        ask(start(slots, tmp_path, "no weights here"), "add", 1, 1)


def test_a_death_shows_the_end_of_the_log(slots: list[Slot], tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match=r"(?s)worker-0 failed.*about to go"):
        ask(start(slots, tmp_path), "die")


def test_waiting_is_bounded(slots: list[Slot], tmp_path: Path) -> None:
    process = start(slots, tmp_path)
    ask(process, "add", 1, 1)
    with pytest.raises(RunFailure, match="no answer from worker-0 within 1 s"):
        ask(process, "hang", timeout=1)
    process.kill()


async def collect(process: Process, method: str, n: int) -> list[int]:
    return [item async for item in process.stream(method, n)]


def test_streams_items(slots: list[Slot], tmp_path: Path) -> None:
    assert asyncio.run(collect(start(slots, tmp_path), "count", 4)) == [0, 1, 2, 3]


def test_a_death_in_mid_stream_is_an_error_not_an_end(slots: list[Slot], tmp_path: Path) -> None:
    with pytest.raises(RunFailure, match="worker-0 failed"):
        asyncio.run(collect(start(slots, tmp_path), "count_then_die", 2))


def test_too_few_devices_name_both_numbers(slots: list[Slot]) -> None:
    with pytest.raises(UserError, match="asks for 4096 devices"), reserve(4096, "cpu", 5):
        pass
