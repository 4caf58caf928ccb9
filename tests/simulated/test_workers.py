"""Workers whose order is a seed's: the same for the same, and not only the order of submission."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvstore.seams import Workers
from tests.simulated import DiskStopped, SeededWorkers, SimulatedDisk, simulate


def order(seed: int) -> list[int]:
    async def run() -> list[int]:
        workers: Workers = SeededWorkers(seed)
        ran: list[int] = []
        await asyncio.gather(*(asyncio.wrap_future(workers.submit(ran.append, number)) for number in range(8)))
        return ran

    return simulate(run(), seed=seed)


def test_equal_seeds_give_equal_orders() -> None:
    assert [order(seed) for seed in range(10)] == [order(seed) for seed in range(10)]


def test_seeds_give_orders_of_their_own() -> None:
    orders = {tuple(order(seed)) for seed in range(30)}
    assert len(orders) == 30
    assert all(sorted(each) == list(range(8)) for each in orders)


def test_nothing_runs_while_it_is_submitted_and_others_run_in_between() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        future = SeededWorkers(1).submit(seen.append, "job")
        seen.append("submitted")
        await asyncio.sleep(0)
        seen.append("between")
        await asyncio.wrap_future(future)
        return seen

    assert simulate(run(), seed=1) == ["submitted", "between", "job"]


def test_a_future_carries_the_result_or_what_was_raised() -> None:
    async def run() -> None:
        workers = SeededWorkers(1)
        assert await asyncio.wrap_future(workers.submit(divmod, 7, 2)) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(workers.submit(divmod, 7, 0))

    simulate(run(), seed=1)


def test_a_disk_that_stops_fails_the_future_not_the_loop() -> None:
    async def run() -> bool:
        disk = SimulatedDisk(1)
        disk.stop_after = 0
        future = SeededWorkers(1).submit(disk.make_directory, Path("/home"))
        with pytest.raises(DiskStopped):
            await asyncio.wrap_future(future)
        await asyncio.sleep(1)
        return isinstance(future.exception(), DiskStopped)

    assert simulate(run(), seed=1)


def test_what_was_cancelled_in_time_does_not_run() -> None:
    async def run() -> list[str]:
        seen: list[str] = []
        workers = SeededWorkers(1)
        assert workers.submit(seen.append, "never").cancel()
        await asyncio.sleep(1)
        workers.close()
        return seen

    assert simulate(run(), seed=1) == []


def test_close_finishes_what_was_taken_in_the_order_it_would_have_had() -> None:
    async def run(seed: int) -> list[int]:
        workers, seen = SeededWorkers(seed), list[int]()
        futures: list[Future[None]] = [workers.submit(seen.append, number) for number in range(8)]
        workers.close()
        workers.close()
        assert all(future.done() for future in futures)
        with pytest.raises(RuntimeError, match="closed"):
            workers.submit(print)
        await asyncio.sleep(1)
        return seen

    for seed in range(10):
        assert simulate(run(seed), seed=seed) == order(seed)
