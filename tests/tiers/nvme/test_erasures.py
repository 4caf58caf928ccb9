"""Older writes, wherever they still lie: second copies that a scan met, writes that ended after their chunk went, files
that could not be removed, slots that are written anew while they are given up. None of them costs a newer one."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import SystemClock, SystemDisk, WorkerThreads
from kvstore.spec import Durability, Encoding
from kvstore.tiers.nvme import erasures, newest
from kvstore.tiers.nvme.slots import RegionFile
from kvstore.tiers.nvme.sync import GroupSync
from kvstore.units import PAGE_BYTES
from tests.contracts.chunks import SMALL, VALUE, balance, chunk, holds, layouts, write
from tests.contracts.evictors import KeepsAll
from tests.contracts.local.stands import REGION_BYTES, nvme_tier
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.tiers.nvme.test_meanwhile import held_up
from tests.tiers.nvme.test_newest import RETRY_S
from tests.tiers.values import ValueService

OLD, NEW = 1, 2


async def twice(service: ValueService) -> None:
    """One write lies in two files: the sync of the first failed, and so did its erasure."""
    assert await service.put(9, "other") is Durability.LOCAL
    service.disk.fail("sync", errno.EIO, path_contains="region-00000", times=None)
    assert await service.put(OLD) is Durability.MEMORY
    service.disk.fail("pwrite", errno.EIO, path_contains="region-00000", times=None)
    await asyncio.sleep(RETRY_S)
    assert await service.level() is Durability.LOCAL
    await service.restart(kill=True, meanwhile=service.disk.mend)
    assert await service.get() == OLD
    assert len(service.device.spares[service.row()]) == 1


async def newer(service: ValueService) -> None:
    """Another value is acknowledged, and is what is there afterwards."""
    assert await service.put(NEW) is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.get() == NEW
    service.balance()


@scenario(lambda: ValueService())
async def test_of_a_value_that_lies_twice_nothing_is_left_once_it_is_replaced(service: ValueService) -> None:
    await twice(service)
    await newer(service)


@scenario(lambda: ValueService())
async def test_a_second_copy_outlasts_the_first_and_is_erased_with_the_value(service: ValueService) -> None:
    """The value is in memory, and is written anew from there. Until then the device has the second copy alone."""
    await twice(service)
    row, (name, offset) = service.row(), service.place_of()
    service.disk.flip(service.nvme.regions._directory / name, offset + service.layout.header_bytes)
    assert not await service.look(row)
    assert len(service.device.spares[row]) == 1
    await newer(service)
    assert not service.device.spares


@scenario(lambda: ValueService())
async def test_a_write_that_ends_after_its_chunk_went_costs_no_newer_one(service: ValueService) -> None:
    """Memory's copy failed its check while the device took it. The newer value is not promised before that ended."""
    go_on = held_up(service, "_fill", after=True)
    older = asyncio.ensure_future(service.put(OLD))
    await asyncio.sleep(0.1)
    await service.controller.parts.movement.removal.quarantine(
        service.mapped, service.row(), service.mapped.residency(service.row())
    )
    replacing = asyncio.ensure_future(newer(service))
    await asyncio.sleep(0.1)
    assert not replacing.done()
    go_on()
    await asyncio.gather(older, replacing)


@scenario(lambda: ValueService())
async def test_a_write_that_ends_after_its_chunk_went_does_not_come_back(service: ValueService) -> None:
    """From then on the device takes nothing: the newer value is in memory only."""
    go_on = held_up(service, "_fill", after=True)
    older = asyncio.ensure_future(service.put(OLD))
    await asyncio.sleep(0.1)
    await service.controller.parts.movement.removal.quarantine(
        service.mapped, service.row(), service.mapped.residency(service.row())
    )
    service.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
    go_on()
    await older
    assert await service.put(NEW) is Durability.MEMORY
    await service.restart(kill=True, meanwhile=service.disk.mend)
    assert await service.get() is None
    service.balance()


@scenario(lambda: ValueService())
async def test_a_file_that_could_not_be_removed_brings_nothing_back(service: ValueService) -> None:
    """It was to make room, and held a value that the device had refused to erase."""
    assert await service.put(OLD) is Durability.LOCAL
    service.disk.fail("pwrite", errno.EIO, path_contains="region-00000", times=None)
    assert await service.put(NEW) is Durability.MEMORY
    await asyncio.sleep(RETRY_S)
    assert await service.level() is Durability.LOCAL
    service.nvme.regions.capacity_bytes = service.nvme.regions.file_bytes
    service.disk.fail("remove", errno.EIO, path_contains="region-00000")
    with pytest.raises(Unavailable):
        await service.nvme.free_slots.take(2 * service.nvme.regions.by_number[0].slot_bytes, Encoding.RAW)
    await service.nvme.erasures.tidy()
    await service.restart(kill=True, meanwhile=service.disk.mend)
    assert await service.get() != OLD
    service.balance()


def test_where_nothing_is_believed_nothing_new_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file was away while more keys were replaced than are remembered; it is back, and the device refuses to forget
    that it is not to be believed."""
    monkeypatch.setattr(newest, "COUNT_MAX", 1)
    service = ValueService()

    async def scenario() -> None:
        keys = ["a", "b", "c"]
        for key in keys:
            assert await service.put(OLD, key) is Durability.LOCAL
        assert {service.place_of(key)[0][:12] for key in keys} == {"region-00000"}
        await service.stop()
        service.disk.fail("open", errno.EACCES, path_contains="region-00000")
        await service.start()
        for key in keys:
            assert await service.put(NEW, key) is Durability.LOCAL
        await service.stop(kill=True)
        service.disk.mend()
        service.disk.fail("remove", errno.EIO, path_contains=newest.NEWEST_FILE, times=None)
        await service.start()
        for key in keys:
            assert await service.put(3, key) is Durability.LOCAL
        await service.restart(kill=True)
        for key in keys:
            assert await service.get(key) == 3
        service.balance()

    service.run(scenario)


@scenario(lambda: ValueService())
async def test_an_older_write_is_no_second_copy_of_a_newer_one(service: ValueService) -> None:
    """As a release without ``newest`` could leave them: the older one in a file that was away when the newer one was
    put. It does not come in where the newer one fails its check."""
    assert await service.put(OLD) is Durability.LOCAL
    await service.stop()
    service.disk.fail("open", errno.EACCES, path_contains="region-00000")
    await service.start()
    assert await service.put(NEW) is Durability.LOCAL
    name, offset = service.place_of()
    home = service.nvme.regions._directory
    await service.stop()
    service.disk.mend()
    service.disk.remove(home / newest.NEWEST_FILE)
    await service.start()
    service.disk.flip(home / name, offset + service.layout.header_bytes)
    for _ in range(2):
        assert await service.get() is None
        await asyncio.sleep(1.0)
    service.balance()


async def its_sync_failed(service: ValueService) -> None:
    """Nor could anything be written down."""
    service.disk.fail("sync", errno.EIO, path_contains="region-00000", times=None)
    service.disk.fail("rename", errno.EIO, times=None)
    with pytest.raises(KVStoreError):
        await service.put(NEW)


async def its_sync_never_came(service: ValueService) -> None:
    async def wait(*_: object) -> None:
        await asyncio.Event().wait()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(GroupSync, "wait", wait)
        putting = asyncio.ensure_future(service.put(NEW))
        await asyncio.sleep(0.1)
        putting.cancel()
        await asyncio.gather(putting, return_exceptions=True)


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "clean stop"])
@pytest.mark.parametrize("is_refused_again", [False, True], ids=["taken", "refused again"])
@pytest.mark.parametrize("way", [its_sync_failed, its_sync_never_came], ids=lambda way: way.__name__)
def test_an_erasure_that_only_the_page_cache_has(
    way: Callable[[ValueService], Awaitable[None]], is_refused_again: bool, kill: bool
) -> None:
    """The process that erased is gone, and the next one reads that nothing is there. The value that it takes stays in
    memory. A power cut takes the erasure back, or not: the seed says so."""
    for seed in range(4):
        service = ValueService(disk=SimulatedDisk(seed))

        async def scenario(service: ValueService = service) -> None:
            assert await service.put(OLD) is Durability.LOCAL
            await way(service)
            await service.stop(kill=kill)
            service.disk.mend()
            if is_refused_again:
                service.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
            await service.start()
            assert await service.get() is None
            service.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
            service.disk.fail("allocate", errno.EIO, times=None)
            assert await service.put(NEW) is Durability.MEMORY
            service.disk.mend()
            for _ in range(2):
                await service.restart(kill=True, meanwhile=service.disk.crash)
                assert await service.get() is None
            for value in range(4, 9):
                assert await service.put(value, f"key {value}") is Durability.LOCAL
            service.balance()

        service.run(scenario)


class _Held(SystemDisk):
    """Writes of a whole slot wait, once it is told so; or those of a header, which an erasure is."""

    def __init__(self, *, holds_erasures: bool = False) -> None:
        self.is_held, self.is_waiting, self.goes_on = False, threading.Event(), threading.Event()
        self.holds_erasures = holds_erasures

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if self.is_held and (buffer.nbytes == PAGE_BYTES) is self.holds_erasures:
            self.is_held = False
            self.is_waiting.set()
            assert self.goes_on.wait(60.0)
        return super().pwrite(descriptor, buffer, offset)


def test_a_slot_that_is_written_anew_is_nobody_elses_before_that_ended(tmp_path: Path) -> None:
    """Its chunk is given up meanwhile: what is written next would be written over."""

    async def scenario() -> None:
        disk = _Held()
        tier = nvme_tier(disk, tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"))
        await tier.recover(KeepsAll())
        residency = await write(tier, chunk(1))
        disk.is_held = True
        renewing = asyncio.ensure_future(tier.renew(residency))
        try:
            assert await asyncio.to_thread(disk.is_waiting.wait, 60.0)
            tier.remove([residency])
            another = await write(tier, chunk(2, SMALL))
        finally:
            disk.goes_on.set()
        await renewing
        assert await holds(tier, chunk(2, SMALL), another)
        await tier.close(None)

    asyncio.run(scenario())


def test_who_erases_what_is_left_leaves_what_another_erased_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be in use again: its chunk would be gone."""
    monkeypatch.setattr(erasures, "AT_ONCE", 1)
    erased: list[int] = []

    async def scenario() -> None:
        tier = nvme_tier(SystemDisk(), tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"))
        await tier.recover(KeepsAll())
        for number in range(3):
            tier.regions.keep_unerased(await write(tier, chunk(number)))
        is_at_it, goes_on = asyncio.Event(), asyncio.Event()

        async def erase(region: RegionFile, *slots: int) -> None:
            erased.extend(slots)
            if not is_at_it.is_set():
                is_at_it.set()
                await goes_on.wait()

        monkeypatch.setattr(tier.erasures, "_erase", erase)
        slow = asyncio.ensure_future(tier.erasures.tidy())
        await is_at_it.wait()
        await tier.erasures.tidy()
        goes_on.set()
        await slow
        balance(tier)
        await tier.close(None)

    asyncio.run(scenario())
    assert sorted(erased) == [0, 1, 2]


def test_nothing_is_erased_in_a_file_that_took_the_place_of_a_removed_one(tmp_path: Path) -> None:
    """Slots of two files are to be erased. While that takes long in the first, the second is removed for chunks of
    another size: their file gets the descriptor that the removed one had."""
    large = layouts()["mla float8"]

    async def scenario() -> None:
        disk = _Held(holds_erasures=True)
        tier = nvme_tier(
            disk, tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"),
            capacity_bytes=2 * REGION_BYTES + 2 * PAGE_BYTES,
        )  # fmt: skip
        await tier.recover(KeepsAll())
        for each in (chunk(1), chunk(2, VALUE)):
            tier.regions.keep_unerased(await write(tier, each))
        _, removed = tier.regions.by_number.values()
        descriptor = removed.descriptor
        disk.is_held = True
        tidying = asyncio.ensure_future(tier.tidy())
        try:
            assert await asyncio.to_thread(disk.is_waiting.wait, 60.0)
            newest = await write(tier, chunk(3, large))
        finally:
            disk.goes_on.set()
        await tidying
        region, _ = tier.regions.find(newest)
        assert removed not in tier.regions.by_number.values()
        assert region.descriptor == descriptor, "else nothing could go wrong"
        assert await holds(tier, chunk(3, large), newest)
        balance(tier)
        await tier.close(None)

    asyncio.run(scenario())


class _Told(dict[tuple[int, int], asyncio.Future[None]]):
    """Calls back as soon as a slot is let go of."""

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __delitem__(self, place: tuple[int, int]) -> None:
        super().__delitem__(place)
        self._callback()


def test_a_slot_that_two_have_erased_is_free_once(tmp_path: Path) -> None:
    """It was being written anew when its chunk failed a check; who erases what was left gets there first."""

    async def scenario() -> None:
        disk = _Held()
        tier = nvme_tier(disk, tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"))
        await tier.recover(KeepsAll())
        first, second = [await write(tier, chunk(number)) for number in (1, 2)]
        tidied: list[asyncio.Future[None]] = []
        tier.erasures._at_work = _Told(lambda: tidied.append(asyncio.ensure_future(tier.erasures.tidy())))
        disk.is_held = True
        renewing = asyncio.ensure_future(tier.renew(first))
        try:
            assert await asyncio.to_thread(disk.is_waiting.wait, 60.0)
            quarantining = asyncio.ensure_future(tier.quarantine(first))
            await asyncio.sleep(0.1)
        finally:
            disk.goes_on.set()
        await asyncio.gather(renewing, quarantining)
        await tier.quarantine(second)
        await asyncio.gather(*tidied)
        balance(tier)
        places = [await write(tier, chunk(number)) for number in range(3, 3 + tier.regions.find(second)[0].slot_count)]
        assert len(set(places)) == len(places)
        balance(tier)
        await tier.close(None)

    asyncio.run(scenario())
