"""Chunks on their way from the device when something ends: each of them ends, and nothing of it comes later."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.movement.loads import CALLS_AT_ONCE
from kvstore.spec import MissReason
from tests.scenario import scenario
from tests.simulated.memory import POISON
from tests.tiers.service import DeviceService

PATH = (1, 2, 3, 4, 5, 6)


class Opening:
    """The device's ``open``, counted; ``wrong`` is raised by the first one instead, after it was opened."""

    def __init__(self, service: DeviceService, wrong: Exception | None = None) -> None:
        self.count = self.done = 0
        self._open, self._wrong = service.nvme.open, wrong
        service.nvme.open = self  # type: ignore[assignment,method-assign]

    @property
    def under_way(self) -> int:
        return self.count - self.done

    async def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        is_first = self.count == 1
        try:
            stored = await self._open(*arguments)
            if self._wrong is not None and is_first:
                stored.close()
                raise self._wrong
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                stored.close()
                raise
            return stored
        finally:
            self.done += 1


@pytest.fixture
def service() -> DeviceService:
    return DeviceService(arena_chunks=32)


@pytest.mark.parametrize("after_s", [0.0, 0.0005])
@scenario()
async def test_a_stop_waits_for_every_chunk_that_is_being_opened(service: DeviceService, after_s: float) -> None:
    """Who stops next closes the device: a job that it still has would be waited for without a limit."""
    await service.keep(*PATH)
    service.forget_memory()
    jobs = 0
    run = service.nvme._run

    async def counted(*arguments: Any) -> Any:
        nonlocal jobs
        jobs += 1
        try:
            return await run(*arguments)
        finally:
            jobs -= 1

    service.nvme._run = counted  # type: ignore[method-assign]  # replaced
    service.controller.fetches.fetch(service.session, service.query(*PATH))
    await asyncio.sleep(after_s)
    assert service._group is not None
    service._group.cancel()
    await asyncio.gather(service._group, return_exceptions=True)
    assert jobs == 0


@scenario()
async def test_a_bug_in_one_opening_loses_the_batch_and_writes_nothing_into_what_was_freed(
    service: DeviceService,
) -> None:
    await service.keep(*PATH)
    service.forget_memory()
    opening = Opening(service, RuntimeError("a bug"))
    result = service.controller.fetches.fetch(service.session, service.query(*PATH))
    async for _ in service.controller.arrivals(result, None):
        pass
    service.controller.release(service.session, [result.lease_id])
    await asyncio.sleep(1.0)
    assert opening.count == len(PATH)
    assert opening.under_way == 0
    assert service.controller.parts.movement.loads.loading_bytes == 0
    assert not any(region.readers for region in service.nvme.regions.by_number.values())
    for resident in result.chunks:
        assert all((piece == POISON).all() for piece in resident.placement.pieces)
    assert await service.fetch(*PATH) == (len(PATH), MissReason.NONE)


@scenario()
async def test_a_fetch_that_memory_refuses_half_way_leaves_nothing_on_its_way(service: DeviceService) -> None:
    """The machine shares no more memory while room for the third chunk is looked for."""
    await service.keep(*PATH)
    service.forget_memory()
    allocate, calls = service.arena.allocate, 0

    def refuse(piece_bytes: tuple[int, ...]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Unavailable("cannot share memory")
        return allocate(piece_bytes)

    service.arena.allocate = refuse  # type: ignore[method-assign]  # replaced
    with pytest.raises(Unavailable):
        service.controller.fetches.fetch(service.session, service.query(*PATH))
    await asyncio.sleep(1.0)
    assert service.controller.parts.movement.loads.loading_bytes == 0
    assert await service.fetch(*PATH) == (len(PATH), MissReason.NONE)


def test_a_long_load_lets_others_run() -> None:
    """Hundreds of chunks that a fetch brings are opened in steps."""
    count, most = 400, 0
    service = DeviceService(arena_chunks=2 * count, capacity_bytes=64 << 20, region_bytes=16 << 20)
    path = [number * number % 997 for number in range(1, count + 1)]

    async def scenario() -> None:
        nonlocal most
        await service.keep(*path)
        service.forget_memory()
        opening = Opening(service)
        fetching = asyncio.ensure_future(service.fetch(*path))
        for _ in range(100):  # turns of the loop, before its time goes on
            before = opening.count
            await asyncio.sleep(0)
            most = max(most, opening.count - before)
        assert opening.count == count
        assert await fetching == (count, MissReason.NONE)

    service.run(scenario)
    assert 0 < most <= CALLS_AT_ONCE


def test_a_chunk_that_leaves_memory_before_the_rest_of_its_load_is_entered_is_freed_once() -> None:
    """Its copy in memory fails a check between two steps. A second time would end all of the tenant's moves."""
    count = 2 * CALLS_AT_ONCE
    service = DeviceService(arena_chunks=2 * count, capacity_bytes=64 << 20, region_bytes=16 << 20)
    path = [number * number % 997 for number in range(1, count + 1)]
    here: list[int] = []

    async def scenario() -> None:
        await service.keep(*path)
        service.forget_memory()
        movement, mapped = service.controller.parts.movement, service.mapped
        pause = movement.loads._pause

        async def fail_a_check(number: int) -> None:
            await pause(number)
            if not number % CALLS_AT_ONCE and not here and (entered := list(mapped.rows())):
                here.extend(entered)
                await movement.removal.quarantine(mapped, here[0], mapped.residency(here[0]))

        movement.loads._pause = fail_a_check  # type: ignore[method-assign]  # the check fails between two steps
        await service.fetch(*path)
        await asyncio.sleep(1.0)
        assert len(here) == CALLS_AT_ONCE
        assert movement.loads.loading_bytes == 0
        assert await service.fetch(*path) == (count, MissReason.NONE)

    service.run(scenario)
