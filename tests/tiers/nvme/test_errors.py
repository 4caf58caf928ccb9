"""A device that is full or fails: what was acknowledged stays, what fails says so, and the rest goes on."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.spec import Durability, LayerSpec, MissReason
from kvstore.tiers import Residency
from tests.contracts.chunks import Chunk, balance, chunk, holds, write
from tests.contracts.evictors import KeepsAll
from tests.contracts.local.stands import HOME, nvme_tier
from tests.scenario import scenario
from tests.simulated import LoopClock, SeededWorkers, SimulatedDisk, simulate
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService

RETRY_S = 15.0
"""Virtual seconds after which what the device refused has been tried again."""


@pytest.fixture
def service() -> DeviceService:
    return DeviceService(arena_chunks=32)


# ---------------------------------------------------------------- sync


@pytest.mark.parametrize("seed", range(60))
def test_a_failed_sync_acknowledges_nothing_that_it_took_along(seed: int) -> None:
    """Writers share syncs, one of which fails; then the power goes. Who was told that it is kept finds it."""
    disk, chance = SimulatedDisk(seed), random.Random(seed)

    async def one(number: int, kept: dict[int, Residency], tier: object) -> None:
        await asyncio.sleep(chance.uniform(0, 0.004))
        try:
            kept[number] = await write(tier, chunk(number))  # type: ignore[arg-type]
        except Unavailable:
            return

    async def scenario() -> None:
        tier = nvme_tier(disk, HOME, LoopClock(), SeededWorkers(seed), SeededWorkers(seed + 1), region_bytes=256 * KIB)
        await tier.recover(KeepsAll())
        kept: dict[int, Residency] = {0: await write(tier, chunk(0))}
        disk.fail("sync", errno.EIO, path_contains="region", after=chance.randrange(3))
        await asyncio.gather(*(one(number, kept, tier) for number in range(1, 9)))
        balance(tier)
        assert any(region.is_read_only for region in tier.regions.by_number.values())
        disk.crash()
        again = nvme_tier(disk, HOME, LoopClock(), SeededWorkers(seed), SeededWorkers(seed + 1))
        await again.recover(KeepsAll())
        for number, residency in kept.items():
            assert await holds(again, chunk(number), residency), number

    simulate(scenario(), seed=seed)


@scenario()
async def test_a_region_that_could_not_sync_takes_no_more(service: DeviceService) -> None:
    """The store that it fails is in memory only, with the reason; the next try goes to another region. What the
    region held before is served as ever."""
    await service.keep(1)
    bad = service.place(1)[0]
    service.disk.fail("sync", errno.EIO, path_contains=bad.name)
    await service.store(service.session, 2)
    settled = await service.settled(2)
    assert (settled.chunk_count, settled.durability) == (1, Durability.MEMORY)
    assert "could not sync" in settled.reason
    assert "could not sync" in service.controller.stats().tier_problem
    assert service.nvme.statistics().state == "read-only"
    service.balance()
    await asyncio.sleep(RETRY_S)
    assert (await service.settled(2)).durability is Durability.LOCAL
    assert service.place(2)[0] != bad
    for number in range(3, 9):
        await service.keep(number)
        assert service.place(number)[0] != bad
    assert service.controller.stats().tier_problem == ""
    assert service.nvme.statistics().state == "up"
    service.balance()
    service.disk.crash()
    await service.restart(kill=True)
    await service.fetch(2)  # what the failed try left of it may be met first: then it is a miss, once
    for number in range(1, 9):
        assert await service.fetch(number) == (1, MissReason.NONE)


@scenario()
async def test_a_region_file_that_somebody_removed_takes_no_more(service: DeviceService) -> None:
    """What is written to a file without a name is gone with the process, however well it is synced."""
    await service.keep(1)
    gone = service.place(1)[0]
    service.disk.remove(gone)
    await service.store(service.session, 2)
    settled = await service.settled(2)
    assert (settled.chunk_count, settled.durability) == (1, Durability.MEMORY)
    assert await service.fetch(1) == (1, MissReason.NONE)
    await asyncio.sleep(RETRY_S)
    assert (await service.settled(2)).durability is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.fetch(1) == (0, MissReason.COLD)
    assert await service.fetch(2) == (1, MissReason.NONE)


@scenario()
async def test_a_device_of_which_every_sync_fails(service: DeviceService) -> None:
    """Stores and fetches go on from memory, and the device holds no more files than it may."""
    await service.keep(0)
    service.disk.fail("sync", errno.EIO, path_contains="region", times=None)
    for number in range(1, 40):
        await service.store(service.session, number)
        assert (await service.settled(number)).durability is Durability.MEMORY
        assert await service.fetch(number) == (1, MissReason.NONE)
        service.balance()
    await asyncio.sleep(RETRY_S)
    service.balance()
    service.disk.mend()
    await asyncio.sleep(RETRY_S)
    await service.keep(50)
    assert (await service.settled(39)).durability is Durability.LOCAL
    service.balance()


# ---------------------------------------------------------------- no room on the file system


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("method", ["open", "allocate", "pwrite", "sync", "sync_directory"])
@scenario()
async def test_a_file_that_cannot_be_made(service: DeviceService, method: str, error: int) -> None:
    """The first store of all: in memory only, the reason names the setting; nothing is left behind; later it works."""
    service.disk.fail(method, error, path_contains="" if method == "sync_directory" else "region", times=None)
    await service.store(service.session, 1)
    settled = await service.settled(1)
    service.disk.mend()
    assert settled.durability is Durability.MEMORY
    if error != errno.EIO:
        assert "tiers.nvme" in settled.reason
        assert "free" in settled.reason
    assert await service.fetch(1) == (1, MissReason.NONE)
    service.balance()
    if method != "pwrite":
        assert service.region_files() == []
    await asyncio.sleep(RETRY_S)
    assert (await service.settled(1)).durability is Durability.LOCAL
    service.balance()
    await service.restart(kill=True)
    assert await service.fetch(1) == (1, MissReason.NONE)


@scenario(
    lambda: DeviceService(arena_chunks=8, capacity_bytes=512 * KIB, disk=SimulatedDisk(1, capacity_bytes=200 * KIB))
)
async def test_a_full_file_system_keeps_what_it_has_and_makes_room_from_it(service: DeviceService) -> None:
    """Half of what the capacity promises is there: the device lives within that."""
    for number in range(40):
        await service.keep(number)
        assert await service.fetch(number) == (1, MissReason.NONE)
        service.balance()
    assert service.counters()["nvme_evicted_chunks"] > 20
    await service.restart()
    held = service.nvme.statistics().chunk_count
    assert held >= 10
    assert await service.fetch(39) == (1, MissReason.NONE)
    service.balance()


LARGE = small_spec(model_id="large", layers=(LayerSpec(kv_heads=12, k_dim=8, v_dim=8),) * 4)


@scenario(lambda: DeviceService(arena_chunks=32, disk=SimulatedDisk(1, capacity_bytes=40 * KIB)))
async def test_the_first_file_of_a_size_fits_the_room_that_the_file_system_has(service: DeviceService) -> None:
    """Less than the usual number of slots, and more than one."""
    for number in range(6):
        await service.keep(number)
        service.balance()
    assert await service.fetch(5) == (1, MissReason.NONE)


@scenario(lambda: DeviceService(arena_chunks=32, disk=SimulatedDisk(1, capacity_bytes=80 * KIB)))
async def test_a_full_file_system_gives_nothing_up_for_what_has_no_room_even_so(service: DeviceService) -> None:
    """A file of small chunks is removed only where a large one has room in its place: chunks that were acknowledged
    would be lost for nothing, and again with each large one that comes."""
    for number in range(6):
        await service.keep(number)
    held = service.nvme.statistics().chunk_count
    huge = service.of(small_spec(model_id="huge", layers=(LayerSpec(kv_heads=48, k_dim=8, v_dim=8),) * 4))
    for number in range(3):
        await huge.store(service.session, 100 + number)
        settled = await huge.settled(100 + number)
        assert settled.durability is Durability.MEMORY
        assert "free some" in settled.reason
        assert service.nvme.statistics().chunk_count == held
    large = service.of(LARGE)
    for number in range(3):
        await large.keep(200 + number)
        service.balance()
    await service.keep(50)
    assert await large.fetch(202) == (1, MissReason.NONE)
    assert await service.fetch(50) == (1, MissReason.NONE)
    service.balance()


@scenario()
async def test_a_slot_that_cannot_be_written(service: DeviceService) -> None:
    """ENOSPC in room that was taken in advance, as a copy-on-write file system has it."""
    await service.keep(1)
    service.disk.fail("pwrite", errno.ENOSPC, path_contains="region")
    await service.store(service.session, 2)
    settled = await service.settled(2)
    assert settled.durability is Durability.MEMORY
    assert "tiers.nvme.directory is full" in settled.reason
    service.balance()
    await asyncio.sleep(RETRY_S)
    assert (await service.settled(2)).durability is Durability.LOCAL
    service.forget_memory()
    assert await service.fetch(1) == (1, MissReason.NONE)
    assert await service.fetch(2) == (1, MissReason.NONE)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("method", ["open", "pwrite", "sync", "rename", "sync_directory"])
@pytest.mark.parametrize("path", ["index", "format"])
@scenario()
async def test_a_snapshot_that_cannot_be_written_costs_a_scan(
    service: DeviceService, method: str, error: int, path: str
) -> None:
    for number in range(6):
        await service.keep(number)
    service.disk.fail(method, error, path_contains="" if method == "sync_directory" else path)
    await service.restart()
    service.disk.mend()
    for number in range(6):
        assert await service.fetch(number) == (1, MissReason.NONE)
    service.balance()


@scenario()
async def test_a_full_file_system_can_be_opened(service: DeviceService) -> None:
    for number in range(6):
        await service.keep(number)
    await service.stop()
    for method in ("allocate", "pwrite"):
        service.disk.fail(method, errno.ENOSPC, times=None)
    await service.start()
    for number in range(6):
        assert await service.fetch(number) == (1, MissReason.NONE)
    await service.stop()
    await service.start()
    service.balance()


# ---------------------------------------------------------------- reads


@pytest.mark.parametrize("after", [0, 1])
@scenario()
async def test_a_read_that_fails_is_a_miss_and_no_loss(service: DeviceService, after: int) -> None:
    """At the header, at the body. The chunk is not quarantined: the device may come back."""
    await service.keep(1, 2)
    service.forget_memory()
    service.disk.fail("pread", errno.EIO, path_contains="region", after=after, times=None)
    count, reason = await service.fetch(1, 2)
    assert count < 2
    assert reason is MissReason.UNAVAILABLE
    service.disk.mend()
    await asyncio.sleep(0.1)
    assert await service.fetch(1, 2) == (2, MissReason.NONE)
    assert service.counters().get("quarantined_chunks", 0) == 0
    await asyncio.sleep(0.1)
    assert service.controller.stats().loading_bytes == 0


@scenario()
async def test_a_copy_that_cannot_be_erased_rests_all_the_same(service: DeviceService) -> None:
    await service.keep(1)
    service.forget_memory()
    service.flip(1, offset=4096)
    service.disk.fail("pwrite", errno.EIO, path_contains="region")
    assert await service.fetch(1) == (0, MissReason.CORRUPT)
    await asyncio.sleep(0.1)
    assert service.nvme.statistics().quarantined_bytes == service.layout.total_bytes
    service.balance()
    await service.keep(1)
    service.forget_memory()
    assert await service.fetch(1) == (1, MissReason.NONE)
    # A scan may meet the bad copy again: whichever it takes first, the chunk is whole or a miss.
    await service.restart(kill=True)
    count, reason = await service.fetch(1)
    assert (count, reason) in ((1, MissReason.NONE), (0, MissReason.CORRUPT))
    await asyncio.sleep(0.1)
    assert await service.fetch(1) == (1, MissReason.NONE)


def test_errors_of_the_device_are_typed() -> None:
    """Whatever fails below, callers of the tier see the tree of ``kvstore.errors``."""

    async def scenario() -> None:
        for seed in range(40):
            chance = random.Random(seed)
            disk = SimulatedDisk(seed)
            tier = nvme_tier(disk, HOME, LoopClock(), SeededWorkers(seed), SeededWorkers(seed))
            await tier.recover(KeepsAll())
            kept: list[tuple[Chunk, Residency]] = []
            for method in ("open", "pread", "pwrite", "sync", "allocate", "sync_directory"):
                disk.fail(method, chance.choice((errno.EIO, errno.ENOSPC)), after=chance.randrange(12), times=2)
            for number in range(12):
                try:
                    kept.append((chunk(number), await write(tier, chunk(number))))
                    await holds(tier, *kept[-1])
                except KVStoreError:
                    continue
                finally:
                    balance(tier)
            disk.mend()
            for what, residency in kept:
                assert await holds(tier, what, residency)

    simulate(scenario(), seed=0)


def test_a_region_whose_erasure_could_not_be_synced_takes_no_more() -> None:
    """An erasure is a write, too: a device that dropped one may drop the next."""
    disk = SimulatedDisk(3)

    async def scenario() -> None:
        tier = nvme_tier(disk, HOME, LoopClock(), SeededWorkers(3), SeededWorkers(4), region_bytes=256 * KIB)
        await tier.recover(KeepsAll())
        first, second = await write(tier, chunk(0)), await write(tier, chunk(1))
        disk.fail("sync", errno.EIO, path_contains="region")
        tier.remove([first], erase=True)
        await tier.tidy()
        assert tier.regions.find(first)[0].is_read_only
        third = await write(tier, chunk(2))
        assert tier.regions.find(third)[0] is not tier.regions.find(first)[0]
        assert await holds(tier, chunk(1), second)
        assert await holds(tier, chunk(2), third)

    simulate(scenario(), seed=3)
