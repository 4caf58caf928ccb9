"""What is under way for a chunk when something else becomes of it: the end of the one does not undo the other."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.movement.writes import LANE_COUNT
from kvstore.seams import SystemClock, SystemDisk, WorkerThreads
from kvstore.seams.jobs import NotBegun
from kvstore.spec import Durability
from kvstore.units import PAGE_BYTES
from tests.contracts.chunks import VALUE, balance, chunk, holds, layouts, write
from tests.contracts.evictors import KeepsAll
from tests.contracts.local.stands import HOME, REGION_BYTES, nvme_tier, scan
from tests.scenario import scenario
from tests.simulated import LoopClock, SeededWorkers, SimulatedDisk, simulate
from tests.specs import small_spec
from tests.tiers.service import DeviceService
from tests.tiers.values import ValueService

OLD, NEW = 1, 2


def held_up(service: DeviceService, method: str, *, after: bool) -> Callable[[], None]:
    """Calls of a method of the tier wait, before or ``after`` they did their work, until the returned function is
    called."""
    call, goes_on = getattr(service.nvme, method), asyncio.Event()

    async def waiting(*arguments: Any, **named: Any) -> Any:
        found = await call(*arguments, **named) if after else None
        await goes_on.wait()
        return found if after else await call(*arguments, **named)

    setattr(service.nvme, method, waiting)
    return goes_on.set


def row_of(service: DeviceService, *path: int) -> int:
    namespace = service.controller.parts.catalog.model(service.model).namespace(None, service.query(*path).exactness)
    return namespace.index[service.query(*path).digests[-1]]


@scenario(lambda: DeviceService(arena_chunks=32))
async def test_a_row_that_became_another_chunks_promises_nothing_for_the_one_before(service: DeviceService) -> None:
    """It was evicted while somebody waited for the device to take it."""
    go_on = held_up(service, "write", after=False)
    for number in range(LANE_COUNT):
        await service.store(service.session, number)
    await service.store(service.session, 100)
    row = row_of(service, 100)
    settling = asyncio.ensure_future(service.settled(100))
    await asyncio.sleep(0.01)
    service.drop(row)
    await service.store(service.session, 200)
    assert row_of(service, 200) == row
    go_on()
    settled = await settling
    assert settled.durability is Durability.NONE
    assert "evicted" in settled.reason
    assert (await service.settled(200)).durability is Durability.LOCAL


@scenario(lambda: DeviceService(arena_chunks=32))
async def test_a_move_whose_model_is_forgotten_while_it_waits_harms_no_other(
    service: DeviceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunk was evicted, and the number of the chunk's namespace is given to a model of shorter chunks. The row is
    free, and still has the old length."""
    go_on = held_up(service, "write", after=False)
    for number in range(LANE_COUNT):
        await service.store(service.session, number)
    forgotten = service.of(small_spec(model_id="forgotten"))
    for number in (1, 2):
        await forgotten.store(forgotten.session, number)
    for row in [row_of(forgotten, number) for number in (1, 2)]:
        service.drop(row)
    catalog = service.controller.parts.catalog
    monkeypatch.setattr(catalog.registered, "_count_max", len(catalog.models))
    shorter = service.of(small_spec(model_id="shorter", chunk_tokens=4))
    assert forgotten.model not in catalog.models
    with monkeypatch.context() as short:
        short.setattr("tests.controller.service.CHUNK", 4)
        await shorter.store(shorter.session, 1)
    go_on()
    assert (await service.settled(0)).durability is Durability.LOCAL
    await service.keep(100)


@scenario(lambda: ValueService())
async def test_a_value_that_was_being_read_does_not_come_in_over_a_newer_one(service: ValueService) -> None:
    """A check found the copy bad while it was on its way to memory; the key was stored anew before it arrived."""
    await service.put(OLD)
    row, device = service.row(), service.device
    service.drop(row)
    go_on = held_up(service, "open", after=True)
    reading = asyncio.ensure_future(service.get())
    await asyncio.sleep(0.1)
    await service.controller.parts.movement.removal.quarantine(device, row, device.residency(row))
    assert await service.put(NEW) is Durability.LOCAL
    go_on()
    await reading
    await asyncio.sleep(1.0)
    assert await service.get() == NEW
    await service.restart(kill=True)
    assert await service.get() == NEW
    service.balance()


class _Late(SystemDisk):
    """A whole slot is written only after its header was erased, if that comes within so long."""

    wait_s = 0.5

    def __init__(self) -> None:
        self.is_armed = False
        self.erased = threading.Event()

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if self.is_armed and buffer.nbytes > PAGE_BYTES:
            self.erased.wait(self.wait_s)
        done = super().pwrite(descriptor, buffer, offset)
        if self.is_armed and buffer.nbytes == PAGE_BYTES:
            self.erased.set()
        return done


def test_a_copy_that_is_written_anew_while_it_is_quarantined_stays_erased(tmp_path: Path) -> None:
    async def scenario() -> None:
        disk = _Late()
        tier = nvme_tier(disk, tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"))
        await tier.recover(KeepsAll())
        residency = await write(tier, chunk(1))
        disk.is_armed = True
        renewing = asyncio.ensure_future(tier.renew(residency))
        await asyncio.sleep(0.1)
        await tier.quarantine(residency)
        await renewing
        assert list(scan(tier)) == []
        assert tier.statistics().chunk_count == 0
        await tier.close(None)

    asyncio.run(scenario())


class _Refusing(SeededWorkers):
    """Takes every job but the second sync."""

    sync_count = 0

    def submit(self, function: Any, /, *args: object) -> Any:
        self.sync_count += getattr(function, "__qualname__", "").startswith("GroupSync.")
        if self.sync_count == 2:
            self.sync_count += 1
            raise RuntimeError("can't start new thread")
        return super().submit(function, *args)


def test_a_sync_that_no_mover_took_closes_no_file() -> None:
    """It says nothing of the device. Those who share it are refused, too, and can try again."""

    async def scenario() -> None:
        movers = [SeededWorkers(1), SeededWorkers(2)]
        tier = nvme_tier(SimulatedDisk(1), HOME, LoopClock(), *movers, keepers=_Refusing(3), region_bytes=512 << 10)
        await tier.recover(KeepsAll())
        writing = [write(tier, chunk(number)) for number in range(16)]
        refused = [each for each in await asyncio.gather(*writing, return_exceptions=True) if not isinstance(each, int)]
        assert len(refused) > 1, "else nobody shared it"
        assert {type(each) for each in refused} == {NotBegun}
        assert not any(region.is_read_only for region in tier.regions.by_number.values())
        assert await holds(tier, chunk(90), await write(tier, chunk(90)))
        balance(tier)
        await tier.close(None)

    simulate(scenario(), seed=1)


class _Syncing(SystemDisk):
    """The first sync waits, once it is told so. A sync of ``failing`` fails once, as on Linux: the next one of the same
    open file says that all is well."""

    def __init__(self) -> None:
        self.is_held, self.is_waiting, self.goes_on = False, threading.Event(), threading.Event()
        self.failing = -1

    def sync(self, descriptor: int) -> None:
        if self.is_held:
            self.is_held = False
            self.is_waiting.set()
            assert self.goes_on.wait(60.0)
        if descriptor == self.failing:
            self.failing = -1
            raise OSError(errno.EIO, "injected")
        super().sync(descriptor)


def test_a_removed_file_is_synced_in_no_others_place(tmp_path: Path) -> None:
    """A writer that waited for its sync gave up, and its file went for chunks of another size. The failure of their
    sync is theirs to hear."""
    large = layouts()["mla float8"]

    async def scenario() -> None:
        disk = _Syncing()
        tier = nvme_tier(
            disk, tmp_path, SystemClock(), WorkerThreads(2, "read"), WorkerThreads(2, "write"),
            capacity_bytes=2 * REGION_BYTES + 2 * PAGE_BYTES,
        )  # fmt: skip
        await tier.recover(KeepsAll())
        await write(tier, chunk(1))
        tier.remove([await write(tier, chunk(2, VALUE))])
        _, removed = tier.regions.by_number.values()
        disk.is_held = True
        first = asyncio.ensure_future(write(tier, chunk(3)))
        try:
            assert await asyncio.to_thread(disk.is_waiting.wait, 60.0)
            given_up = asyncio.ensure_future(write(tier, chunk(4, VALUE)))
            while removed.number not in tier._sync._batch.regions:  # noqa: ASYNC110 - threads write it
                await asyncio.sleep(0.001)
            given_up.cancel()
            await asyncio.wait([given_up])
            last = asyncio.ensure_future(write(tier, chunk(5, large)))
            while removed.number + 1 not in tier._sync._batch.regions:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.001)
            disk.failing = tier.regions.by_number[removed.number + 1].descriptor
        finally:
            disk.goes_on.set()
        await first
        with pytest.raises(Unavailable):
            await last
        await tier.close(None)

    asyncio.run(scenario())


@scenario(lambda: DeviceService(arena_chunks=2))
async def test_memory_that_a_write_reads_takes_no_other_chunk(service: DeviceService) -> None:
    """The copy in memory failed a check while it waited for the device, and leaves. Another chunk's bytes in its slot
    would be known to nobody."""
    go_on = held_up(service, "write", after=False)
    await service.store(service.session, 1)
    memory, row = service.mapped, row_of(service, 1)
    await asyncio.sleep(0.01)
    pieces = memory.placement(row).pieces
    before = [piece.copy() for piece in pieces]
    await service.controller.parts.movement.removal.quarantine(memory, row, memory.residency(row))
    for number in (2, 3):
        await service.store(service.session, number)
    assert all((one == other).all() for one, other in zip(pieces, before, strict=True))
    go_on()
    assert (await service.settled(2)).durability is Durability.LOCAL
    await service.keep(4)
    assert service.arena.chunk_count == len(list(memory.rows()))
