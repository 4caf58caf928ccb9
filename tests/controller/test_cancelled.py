"""A call that is cancelled in the very step in which what it waits for comes true is cancelled all the same. Python
3.11's ``asyncio.wait_for`` swallows it there: a task that runs for ever then never ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.movement.targets import MoveTarget
from kvstore.movement.writes import Writes
from kvstore.seams.deadline import Deadline
from tests.controller.service import Service

STEPS = range(5)


async def cancelled_after(steps: int, call: Awaitable[Any], come: Callable[[], None]) -> None:
    """Have a call wait, make true what it waits for, and cancel it so many steps of the loop later."""
    task = asyncio.ensure_future(call)
    for _ in STEPS:
        await asyncio.sleep(0)
    assert not task.done()
    come()
    for _ in range(steps):
        await asyncio.sleep(0)
    was_cancelled = task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() is was_cancelled


@pytest.mark.parametrize("steps", STEPS)
async def test_a_store_that_waits_for_room(steps: int) -> None:
    service = Service()
    writes = service.parts.movement._writes(cast(MoveTarget, SimpleNamespace(name="nvme")))  # nothing is written
    assert isinstance(writes, Writes)
    await cancelled_after(steps, writes.progress(10.0), lambda: writes._settled(0))


@pytest.mark.parametrize("steps", STEPS)
async def test_a_shard_that_waits_for_the_others(steps: int) -> None:
    service = Service()
    controller = service.controller
    session = controller.open_session()
    result = await service.reserve(session, 1, shards=2)
    reservation = controller.reservations.find(session, result.reservation_id)
    call = controller.commit(session, result.reservation_id, [], 0)
    await cancelled_after(steps, call, lambda: controller.reservations.end(reservation))


@pytest.mark.parametrize("steps", STEPS)
async def test_the_end_of_a_store_that_waits_for_its_jobs(steps: int) -> None:
    service = Service()
    reservations = service.controller.reservations
    session = service.controller.open_session()
    result = await service.reserve(session, 1)
    reservation = reservations.find(session, result.reservation_id)
    reservation.busy = 1
    reservation.idle.clear()

    def come() -> None:
        reservation.busy = 0
        reservation.idle.set()

    await cancelled_after(steps, reservations.idle(reservation, Deadline.of(service.clock, 10.0, 10.0)), come)
