"""Virtual time: it costs none, it ends in an error rather than in a wait, and it runs the same way each time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.seams import Clock
from tests.simulated import LoopClock, SimulatedLoop, simulate


def test_a_day_takes_no_time() -> None:
    async def wait() -> float:
        await asyncio.sleep(24 * 3600)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert simulate(wait(), seed=1) == 25 * 3600  # and no test may take two minutes


def test_timers_come_in_order_of_time() -> None:
    async def race() -> list[tuple[int, float]]:
        arrived: list[tuple[int, float]] = []

        async def arrive(after: int) -> None:
            await asyncio.sleep(after)
            arrived.append((after, asyncio.get_running_loop().time()))

        async with asyncio.TaskGroup() as group:
            for after in (3, 1, 2):
                group.create_task(arrive(after))
        return arrived

    assert simulate(race(), seed=1) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_time_stands_still_while_there_is_work() -> None:
    async def work() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert simulate(work(), seed=1) == 0.0


async def wait_for_nothing() -> None:
    await asyncio.Event().wait()


async def wait_for_a_socket() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        await asyncio.get_running_loop().sock_recv(here, 1)


@pytest.mark.parametrize("stuck", [wait_for_nothing, wait_for_a_socket])
def test_a_wait_that_nothing_ends_is_an_error(stuck: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with pytest.raises(RuntimeError, match="nothing left to run: deadlock"):
        simulate(stuck(), seed=1)


def test_tasks_clean_up_after_a_deadlock() -> None:
    cleaned = []

    async def stuck() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    with pytest.raises(RuntimeError, match="deadlock"):
        simulate(stuck(), seed=1)
    assert cleaned == [True]


def test_what_fails_names_its_seed() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") as raised:
        simulate(fail(), seed=4711)
    assert raised.value.__notes__ == ["simulation seed 4711"]


def test_there_are_no_threads() -> None:
    async def leave() -> None:
        await asyncio.to_thread(print)

    with pytest.raises(RuntimeError, match="no threads"):
        simulate(leave(), seed=1)


def test_the_loop_is_closed_in_the_end() -> None:
    async def which() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    loop = simulate(which(), seed=1)
    assert isinstance(loop, SimulatedLoop)
    assert loop.is_closed()


def test_a_future_of_a_thread_pool_may_be_awaited() -> None:
    async def finish() -> str:
        future: Future[str] = Future()
        asyncio.get_running_loop().call_later(1, future.set_result, "done")
        return await asyncio.wrap_future(future)

    assert simulate(finish(), seed=1) == "done"


def test_sets_of_tasks_are_in_order_of_creation() -> None:
    """asyncio cancels a group's tasks, and hands out those of ``wait``, in the order of a set."""

    async def cancel() -> list[int]:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise

        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(wait(number))
                await asyncio.sleep(1)
                raise ValueError
        return cancelled

    assert simulate(cancel(), seed=1) == list(range(50))


def test_the_loop_s_clock() -> None:
    async def live() -> list[float]:
        clock: Clock = LoopClock()
        seen = [clock.monotonic()]
        await clock.sleep(2)
        seen.append(clock.wall())
        return seen

    assert simulate(live(), seed=1) == [0.0, 2.0]
