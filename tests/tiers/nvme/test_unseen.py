"""Parts of the device that one start does not see: files that cannot be opened, headers that cannot be read. What was
acknowledged there comes back with them; until then it is a miss, and its room is nobody else's."""

from __future__ import annotations

import asyncio
import errno

import pytest

from kvstore.spec import Durability, LayerSpec, MissReason
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService

NUMBERS = range(1, 9)
WELL = (1, MissReason.NONE)
AWAY = {"open": errno.EMFILE, "size": errno.EIO, "pread": errno.EIO}


@pytest.fixture
def service() -> DeviceService:
    return DeviceService(arena_chunks=32)


async def kept(service: DeviceService) -> None:
    for number in NUMBERS:
        await service.keep(number)


async def missing(service: DeviceService) -> list[int]:
    outcomes = {number: await service.fetch(number) for number in NUMBERS}
    assert all(outcome == WELL or outcome[0] == 0 for outcome in outcomes.values()), outcomes
    return [number for number, outcome in outcomes.items() if outcome != WELL]


async def busy(service: DeviceService) -> None:
    """Other stores: whatever counts as free room is written over."""
    for number in range(100, 112):
        await service.keep(number)


@pytest.mark.parametrize("is_clean", [True, False], ids=["snapshot", "scan"])
@pytest.mark.parametrize("method", AWAY)
@scenario()
async def test_a_file_that_one_start_cannot_open_comes_back(
    service: DeviceService, method: str, is_clean: bool
) -> None:
    """Whatever the life in between does, and however it ends; the files stay below the cap with it."""
    await kept(service)
    file = service.place(1)[0]
    inside = [number for number in NUMBERS if service.place(number)[0] == file]
    await service.stop(kill=not is_clean)
    service.disk.fail(method, AWAY[method], path_contains=file.name, times=1)
    await service.start()
    assert await missing(service) == inside
    await busy(service)
    for again in (False, True, False):
        await service.stop(kill=again)
        await service.start()
        assert service.region_bytes_used() <= service.capacity_bytes
        assert await missing(service) == []
    service.balance()


@scenario()
async def test_a_file_that_stays_away_for_some_starts_comes_back(service: DeviceService) -> None:
    await kept(service)
    file = service.place(1)[0]
    inside = [number for number in NUMBERS if service.place(number)[0] == file]
    await service.stop()
    service.disk.fail("open", errno.EACCES, path_contains=file.name, times=None)
    for _ in range(3):
        await service.start()
        assert await missing(service) == inside
        for number in NUMBERS:
            if number not in inside:  # of the others nothing has to be proven anew
                assert (await service.settled(number)).durability is Durability.LOCAL
        await service.stop()
    service.disk.mend()
    await service.start()
    assert await missing(service) == []
    service.balance()


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean stop", "kill"])
@scenario()
async def test_a_header_that_one_scan_cannot_read_is_read_at_the_next_start(
    service: DeviceService, is_clean: bool
) -> None:
    """Slots as small as these are read in runs, then one by one: the run fails, and two headers of it."""
    await kept(service)
    file = service.place(1)[0]
    await service.stop(kill=True)
    service.disk.fail("pread", errno.EIO, path_contains=file.name, after=1, times=3)
    await service.start()
    service.disk.mend()
    lost = await missing(service)
    assert len(lost) == 2
    assert service.nvme.statistics().quarantined_bytes == 2 * service.layout.total_bytes
    service.balance()
    await busy(service)
    await service.restart(kill=not is_clean)
    assert await missing(service) == []
    assert service.nvme.statistics().quarantined_bytes == 0
    service.balance()


def test_a_file_with_a_header_that_cannot_be_read_is_not_given_up_for_another() -> None:
    """Nothing that is known of is in it; and the device is full of chunks of another size."""
    small = DeviceService(arena_chunks=32, capacity_bytes=70 * KIB)
    wide_spec = small_spec(model_id="wide", layers=(LayerSpec(kv_heads=16, k_dim=8, v_dim=8),) * 2)

    async def scenario() -> None:
        await small.keep(1)
        file, offset = small.place(1)
        await small.stop(kill=True)
        pread, bad = small.disk.pread, range(offset, offset + 1)

        def refuse(descriptor: int, buffer: memoryview, at: int) -> int:
            is_file = small.disk._find(descriptor).path == file
            if is_file and any(at <= place < at + len(buffer) for place in bad):
                raise OSError(errno.EIO, "injected")
            return pread(descriptor, buffer, at)

        small.disk.pread = refuse  # type: ignore[method-assign]
        await small.start()
        wide = small.of(wide_spec)
        for number in range(100, 108):
            await wide.store(wide.session, number)
            assert (await wide.settled(number)).durability is Durability.MEMORY
        assert file in small.region_files()
        bad = range(0)
        await small.restart(kill=True)
        assert await small.fetch(1) == WELL
        small.balance()

    small.run(scenario)


@scenario()
async def test_nothing_is_said_to_be_there_that_was_not_read(service: DeviceService) -> None:
    """All of a file's headers fail: all of its chunks are misses, at once, and storing them again works."""
    await kept(service)
    file = service.place(1)[0]
    inside = [number for number in NUMBERS if service.place(number)[0] == file]
    await service.stop(kill=True)
    service.disk.fail("pread", errno.EIO, path_contains=file.name, after=1, times=len(inside) + 1)
    await service.start()
    service.disk.mend()
    since_s = asyncio.get_running_loop().time()
    assert await missing(service) == inside
    assert asyncio.get_running_loop().time() - since_s < 1.0
    for number in inside:
        await service.keep(number)
    await service.restart(kill=True)
    assert await missing(service) == []
    service.balance()
