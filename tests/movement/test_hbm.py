"""Copies on a device: filled by use, the right bytes, the first to give way, and never the only ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvstore.controller import FetchResult
from kvstore.errors import Exhausted, Unavailable
from kvstore.movement.hbm import HbmCopies
from kvstore.seams import SystemClock
from kvstore.seams.devices.memory import HostDevice, HostRegion
from kvstore.spec import MissReason, Tier
from kvstore.tiers.hbm import HbmTier, Pool
from kvstore.tiers.hbm.tier import _Copy
from tests.controller.service import soon
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.tiers.service import DeviceService

ROOM = 4
"""Chunks that the pool has room for."""


class Moving(InlineWorkers):
    """Moves bytes at once; fails while it is told to, or the job before which ``left`` are left; ``before`` runs before
    each job."""

    fails = False
    left: int | None = None
    before: Callable[[], None] = staticmethod(lambda: None)

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        self.before()
        if self.left is not None:
            self.left -= 1
        if self.fails or self.left == -1:
            failed: Future[Any] = Future()
            failed.set_exception(Unavailable("the device is lost"))
            return failed
        return super().submit(function, *args)


class HbmService(DeviceService):
    """A service with a pool in the host's memory."""

    async def attach(self) -> None:
        self.moving = Moving()
        self.pool = Pool(HostDevice(self.memory), self.memory, ROOM * self.layout.total_bytes)
        await self.parts.movement.attach_hbm(HbmTier(self.pool, self.moving))
        await super().attach()

    @property
    def hbm(self) -> HbmCopies:
        found = self.parts.movement.hbm
        assert found is not None
        return found

    def row(self, *path: int) -> int:
        namespace = self.parts.catalog.model(self.model).namespace(None, self.query(*path).exactness)
        return namespace.index[self.query(*path).digests[-1]]

    def ask(self, *path: int, keep: bool = False) -> FetchResult:
        """Fetch to the device; what is said to lie there is the chunk, whole."""
        query = self.query(*path, on_device=True)
        result = self.controller.fetches.fetch(self.session, query)
        region = self.pool.region
        assert isinstance(region, HostRegion)
        for chunk in result.chunks:
            assert chunk.placement is not None
            if (extent := chunk.on_device) is not None:
                there = region.bytes[extent.offset : extent.offset + extent.byte_count]
                assert (there == np.concatenate(chunk.placement.pieces)).all()
                assert int(self.pool.generations.bytes.view(np.uint64)[extent.slot]) == extent.generation
        if not keep:
            self.controller.release(self.session, [result.lease_id])
        return result

    async def bring(self, *path: int) -> None:
        self.ask(*path)
        await soon(lambda: self.row(*path) in self.hbm)


@scenario(lambda: HbmService())
async def test_filled_by_use_and_told(service: HbmService) -> None:
    await service.store(service.session, 1, 2)
    plain = service.controller.fetches.fetch(service.session, service.query(1, 2))
    assert plain.tier is Tier.DRAM
    first = service.ask(1, 2)
    assert (first.tier, [each.on_device for each in first.chunks]) == (Tier.DRAM, [None, None])
    await soon(lambda: service.row(1, 2) in service.hbm)
    second = service.ask(1, 2)
    assert second.tier is Tier.HBM
    assert all(each.on_device for each in second.chunks)
    assert service.controller.fetches.fetch(service.session, service.query(1, 2)).chunks[0].on_device is None
    counters = service.counters()
    assert counters["hbm_fetched_chunks"] == counters["hbm_written_chunks"] == 2
    tiers = {each.name: each for each in service.controller.stats().tiers}
    assert tiers["hbm"].chunk_count == 2
    assert [each.stats.name for each in service.parts.movement.accounts()] == ["hbm", "dram", "nvme"]


@scenario(lambda: HbmService())
async def test_what_leaves_memory_leaves_the_device_and_is_read_from_nowhere_there(service: HbmService) -> None:
    await service.keep(1)
    await service.bring(1)
    before = service.ask(1).chunks[0].on_device
    service.drop(service.row(1))
    assert service.row(1) not in service.hbm
    assert int(service.pool.generations.bytes.view(np.uint64)[before.slot]) != before.generation
    assert service.pool.free_bytes == service.pool.capacity_bytes
    assert await service.fetch(1) == (1, MissReason.NONE)  # read from the device below
    assert service.ask(1).chunks[0].on_device is None


@scenario(lambda: HbmService())
async def test_a_chunk_without_another_copy_is_lost_with_memory(service: HbmService) -> None:
    await service.keep(1)
    await service.bring(1)
    service.parts.movement.removal.remove(service.row(1), MissReason.EVICTED)
    assert service.controller.fetches.fetch(service.session, service.query(1)).hit_count == 0
    assert service.pool.free_bytes == service.pool.capacity_bytes


@scenario(lambda: HbmService())
async def test_the_least_recently_used_go_first_and_held_ones_stay(service: HbmService) -> None:
    for number in range(1, 7):
        await service.keep(number)
    for number in range(1, 5):
        await service.bring(number)
    held = service.ask(1, keep=True)
    for number in range(2, 5):
        service.ask(number)
    await service.bring(5)  # 2 is the least recently used that nothing holds
    assert [number for number in range(1, 6) if service.row(number) in service.hbm] == [1, 3, 4, 5]
    service.controller.release(service.session, [held.lease_id])
    await service.bring(6)
    assert [number for number in range(1, 7) if service.row(number) in service.hbm] == [3, 4, 5, 6]
    assert service.counters()["hbm_demoted_chunks"] == 2


@scenario(lambda: HbmService())
async def test_a_chain_longer_than_the_pool_keeps_its_beginning(service: HbmService) -> None:
    path = tuple(range(1, 8))
    await service.store(service.session, *path)
    for _ in range(3):
        service.ask(*path)
        await soon(lambda: service.hbm.tier.statistics().chunk_count == ROOM)
    assert [each.on_device is not None for each in service.ask(*path).chunks] == [True] * ROOM + [False] * 3
    assert service.counters()["hbm_written_chunks"] == ROOM


@pytest.mark.parametrize("place", ["header", "strip"])
@scenario(lambda: HbmService())
async def test_a_check_finds_what_somebody_wrote_there(service: HbmService, place: str) -> None:
    await service.keep(1)
    await service.bring(1)
    looks = dict(service.parts.movement.looks(service.row(1)))
    assert list(looks) == ["hbm", "dram", "nvme"]
    assert await looks["hbm"]() is True
    extent, region = service.hbm.extent(service.row(1)), service.pool.region
    assert isinstance(region, HostRegion)
    region.bytes[extent.offset + (40 if place == "header" else service.layout.header_bytes)] ^= 1
    assert await looks["hbm"]() is False
    assert service.row(1) not in service.hbm
    assert await looks["dram"]() is True
    assert service.check(service.session, 1) == 1


@scenario(lambda: HbmService())
async def test_a_copy_that_left_memory_on_its_way_does_not_count(service: HbmService) -> None:
    await service.keep(1)
    row = service.row(1)
    service.moving.before = lambda: service.parts.movement.removal.remove(row, MissReason.EVICTED)
    service.ask(1)
    await soon(lambda: service.pool.free_bytes == service.pool.capacity_bytes and not service.mapped.have_all([row]))
    assert row not in service.hbm


@scenario(lambda: HbmService())
async def test_a_device_that_fails_costs_copies_and_nothing_else(service: HbmService) -> None:
    await service.store(service.session, 1, 2)
    service.moving.fails = True
    service.ask(1, 2)
    await soon(lambda: service.hbm.tier.statistics().state == "failing")
    assert service.check(service.session, 1, 2) == 2
    assert service.pool.free_bytes == service.pool.capacity_bytes
    service.moving.fails = False
    await service.bring(1, 2)
    assert service.hbm.tier.statistics().state == "up"


@scenario(lambda: HbmService())
async def test_each_job_fails_in_turn(service: HbmService) -> None:
    """A copy that does not come, a check without a result: the service has the chunk, and the device no wrong one."""
    await service.keep(1)
    for number in range(10):
        await soon(lambda: service.row(1) in service.mapped)
        service.moving.left = number
        service.ask(1)
        await soon(lambda: service.row(1) in service.hbm or (service.moving.left or 0) < 0)
        looks = dict(service.parts.movement.looks(service.row(1)))
        results = [await looks["hbm"]()] if "hbm" in looks else []
        assert results in ([], [None], [True])
        assert service.ask(1).hit_count == 1  # and what it says to lie on the device is the chunk
        service.drop(service.row(1))
        service.moving.left = None
        await soon(lambda: service.pool.free_bytes == service.pool.capacity_bytes)
        assert await service.fetch(1) == (1, MissReason.NONE)
        if results == [True]:
            return
    raise AssertionError("it never ended well")


@scenario(lambda: HbmService())
async def test_a_stop_gives_the_memory_back(service: HbmService) -> None:
    await service.keep(1)
    await service.bring(1)
    await service.restart()
    assert service.row(1) not in service.hbm
    assert await service.fetch(1) == (1, MissReason.NONE)


class Hanging(Moving):
    """A device that does not answer, while ``hangs``."""

    hangs = False

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        if not self.hangs:
            return super().submit(function, *args)
        self.taken.append(Future())
        return self.taken[-1]


@scenario(lambda: HbmService())
async def test_a_device_that_hangs_is_seen_and_nothing_piles_up_behind_it(service: HbmService) -> None:
    hanging = Hanging()
    tier, copies = service.hbm.tier, service.hbm
    tier._workers = hanging
    hanging.hangs = True
    await service.keep(1, 2, 3)
    for _ in range(5):
        service.ask(1, 2, 3)
    await soon(lambda: len(hanging.taken) == 1)
    for _ in range(5):
        service.ask(1, 2, 3)
    assert len(copies._waiting) <= 3, "each chunk waits once"
    assert not service.parts.catalog.table.is_held(service.row(1)), "whoever removes or replaces it is not kept"
    tier._clock = Later(60.0)
    assert next(each.stalled_s for each in service.parts.movement.accounts() if each.stats.name == "hbm") > 50
    await service.store(service.session, 4)
    before = len(copies._waiting)
    service.ask(4)
    assert len(copies._waiting) == before
    hanging.hangs = False
    hanging.taken[0].set_result(None)
    await soon(lambda: service.row(1, 2, 3) in copies)


class Later(SystemClock):
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def monotonic(self) -> float:
        return super().monotonic() + self._seconds


@scenario(lambda: HbmService())
async def test_a_cancelled_copy_does_not_wait_for_the_device_and_its_room_is_free_afterwards(
    service: HbmService,
) -> None:
    hanging = Hanging()
    service.hbm.tier._workers = hanging
    hanging.hangs = True
    await service.store(service.session, 1)
    row = service.row(1)
    filling = asyncio.ensure_future(service.hbm._fill(row))
    await soon(lambda: len(hanging.taken) == 1)
    filling.cancel()
    await soon(filling.done)
    assert filling.cancelled()
    assert service.pool.free_bytes < service.pool.capacity_bytes, "the device may still write there"
    hanging.taken[0].set_result(None)
    await soon(lambda: service.pool.free_bytes == service.pool.capacity_bytes)
    assert row not in service.hbm


@scenario(lambda: HbmService())
async def test_the_tiers_below_are_closed_before_a_device_that_hangs_is_waited_for(service: HbmService) -> None:
    await service.keep(1)
    closed: list[str] = []
    movement, hbm = service.parts.movement, service.hbm.tier
    for tier in (movement._table.copies[1].tier, hbm):
        close = tier.close

        async def told(held: Any, name: str = tier.name, close: Any = close) -> None:
            closed.append(name)
            await close(held)

        tier.close = told
    await service.restart()
    assert closed == ["nvme", "hbm"]


@scenario(lambda: HbmService())
async def test_a_larger_chunk_drives_out_neighbours_not_half_the_pool(service: HbmService) -> None:
    small, count = 8192, 2048
    pool = Pool(HostDevice(service.memory), service.memory, count * small)
    tier = HbmTier(pool, Moving())
    copies = HbmCopies(
        service.parts.catalog, service.mapped, tier, service.parts.movement.names, service.parts.counters
    )
    await tier.recover(copies)
    extents = [pool.allocate(small) for _ in range(count)]
    for number in np.random.default_rng(1).permutation(count).tolist():
        tier._copies[extents[number].slot] = _Copy(extents[number], b"")
        copies._there[number] = extents[number].slot
    assert tier._allocate(64 * small).byte_count == 64 * small
    assert len(copies._there) >= count - 16 - 64
    copies._request = frozenset(range(count))
    with pytest.raises(Exhausted):
        tier._allocate(64 * small)
