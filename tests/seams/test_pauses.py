"""Long work lets others run: after its step, and one piece of it per round of the loop."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.seams import LongWork, Rounds
from kvstore.seams.pauses import QUIET_ROUNDS, ROUNDS_MAX, STEP_S
from tests.simulated import ManualClock


async def test_others_run_after_a_step_and_not_before() -> None:
    clock, rounds = ManualClock(), 0
    pauses = LongWork(clock).begin()

    async def other() -> None:
        nonlocal rounds
        rounds += 1

    asyncio.get_running_loop().create_task(other())
    for _ in range(10):
        await pauses.between()
    assert rounds == 0
    clock.advance(STEP_S)
    await pauses.between()
    assert rounds == 1


async def test_of_many_pieces_one_goes_on_per_round() -> None:
    clock = ManualClock()
    work, gone_on = LongWork(clock), 0

    async def piece() -> None:
        nonlocal gone_on
        pauses = work.begin()
        clock.advance(STEP_S)
        await pauses.between()
        gone_on += 1

    tasks = [asyncio.get_running_loop().create_task(piece()) for _ in range(20)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert gone_on <= 5
    await asyncio.gather(*tasks)
    assert gone_on == 20


async def test_pieces_that_begin_in_one_round_do_not_each_take_a_whole_step_of_it() -> None:
    """40 releases of 16,384 ids at once kept others waiting for 40 steps."""
    clock, short_ones = ManualClock(), 0
    work = LongWork(clock)

    async def piece(item_count: int) -> None:
        nonlocal short_ones
        pauses = work.begin()
        for _ in range(item_count):
            clock.advance(STEP_S / 64)
            await pauses.between()
        short_ones += item_count == 1

    tasks = [asyncio.get_running_loop().create_task(piece(1 if number % 2 else 640)) for number in range(20)]
    await asyncio.sleep(0)
    assert short_ones == 10, "short ones wait for nobody"
    assert clock.monotonic() < 4 * STEP_S
    await asyncio.gather(*tasks)


async def test_short_work_waits_for_none_of_many_that_wait_for_their_turn() -> None:
    """40 clients store long chains all the time: a lookup of a short one is answered in between."""
    clock = ManualClock()
    work = LongWork(clock)

    async def piece() -> None:
        pauses = work.begin()
        for _ in range(128):
            clock.advance(STEP_S / 16)
            await pauses.between()

    tasks = [asyncio.get_running_loop().create_task(piece()) for _ in range(40)]
    for _ in range(10):
        await asyncio.sleep(0)
    pauses, began_s = work.begin(), clock.monotonic()
    for _ in range(4):
        clock.advance(STEP_S / 16)
        await pauses.between()
    assert clock.monotonic() - began_s == pytest.approx(STEP_S / 4)
    await asyncio.gather(*tasks)


async def test_a_burst_has_begun_before_any_of_it_goes_on_but_an_endless_one_is_not_waited_for() -> None:
    """gRPC takes two rounds to begin a call: each long one took a step meanwhile, and a short one behind 40 of them
    waited for most of their work."""
    work, gone_on = LongWork(ManualClock()), 0

    async def piece() -> None:
        nonlocal gone_on
        await work.begin().turn()
        gone_on += 1

    async def arrive(count: int) -> list[asyncio.Task[None]]:
        tasks = []
        for _ in range(count):
            tasks.append(asyncio.create_task(piece()))
            for _ in range(2):
                await asyncio.sleep(0)
        return tasks

    tasks = await arrive(ROUNDS_MAX // 4)
    assert gone_on == 0
    for _ in range(2 * QUIET_ROUNDS):
        await asyncio.sleep(0)
    assert gone_on
    tasks += await arrive(ROUNDS_MAX)
    assert gone_on > 1
    await asyncio.gather(*tasks)


async def test_the_long_work_of_several_tenants_takes_its_steps_one_by_one() -> None:
    """Each tenant took one in every round of the loop that they share."""
    clock, rounds = ManualClock(), Rounds()
    gone_on = 0

    async def piece(work: LongWork) -> None:
        nonlocal gone_on
        await work.begin().turn()
        gone_on += 1

    tasks = [asyncio.create_task(piece(LongWork(clock, rounds))) for _ in range(10)]
    seen = [0]
    while seen[-1] < len(tasks):
        await asyncio.sleep(0)
        seen.append(gone_on)
    assert max(after - before for before, after in zip(seen, seen[1:], strict=False)) == 1
    await asyncio.gather(*tasks)
