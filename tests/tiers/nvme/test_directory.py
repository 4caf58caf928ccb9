"""Bad input on the device: what is damaged is a miss with a reason, what is not is served, and the service is up."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.spec import ChunkState, Durability, LayerSpec, MissReason
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.specs import small_spec
from tests.tiers.nvme.chains import PATHS, STARTS, damaged, served, storable, stored
from tests.tiers.service import DeviceService


@pytest.mark.parametrize("start", STARTS)
@scenario()
async def test_a_truncated_region(service: DeviceService, start: str) -> None:
    """Its chunks up to the cut are there."""

    def cut(disk: SimulatedDisk, files: list[Path]) -> None:
        disk.write_file(files[1], disk.read_file(files[1])[: 4096 + 2 * 12288 + 5000])

    await stored(service)
    await service.restart(kill=start == "scan", meanwhile=damaged(service, cut))
    assert 0 < len(await served(service)) <= 2
    service.balance()
    await storable(service)


@pytest.mark.parametrize("left", [0, 100, 4096, 4097])
@pytest.mark.parametrize("start", STARTS)
@scenario()
async def test_a_region_of_which_nearly_nothing_is_left(service: DeviceService, start: str, left: int) -> None:
    def cut(disk: SimulatedDisk, files: list[Path]) -> None:
        disk.write_file(files[0], disk.read_file(files[0])[:left])

    await stored(service)
    await service.restart(kill=start == "scan", meanwhile=damaged(service, cut))
    lost = await served(service)
    assert 0 < len(lost) <= 3
    assert {reason for _, reason in lost.values()} <= {MissReason.COLD, MissReason.CORRUPT}
    service.balance()
    await storable(service)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("place", [0, 8, 17, 24, 33, 48, 55, 56])
def test_a_flipped_header_page_loses_nothing(
    service: DeviceService, start: str, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await stored(service)
        await service.restart(kill=start == "scan", meanwhile=flip)
        assert await served(service) == {}
        service.balance()
        caplog.clear()
        await service.restart(kill=True)  # mended at the first start: as good as new at the second
        assert "damaged" not in caplog.text
        assert await served(service) == {}
        await storable(service)

    def flip() -> None:
        for path in service.region_files():
            service.disk.flip(path, place)

    service.run(scenario)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("offset", [0, 33, 200, 350, 384, 3000, 4096, 8192])
@scenario()
async def test_a_flipped_chunk(service: DeviceService, start: str, offset: int) -> None:
    """Header or body, first chunk of a chain: the chain is a miss, its slot rests, the key can be stored again."""
    await stored(service)
    file, place = service.place(PATHS[3][0])
    await service.restart(kill=start == "scan", meanwhile=lambda: service.disk.flip(file, place + offset))
    lost = await served(service)
    found_by_scan = start == "scan" and offset < 4096
    reason = MissReason.COLD if found_by_scan else MissReason.CORRUPT
    assert lost == {PATHS[3]: (0, reason)}
    now = service.nvme.statistics()
    assert now.quarantined_bytes == (0 if found_by_scan else service.layout.total_bytes)
    assert service.counters().get("quarantined_chunks", 0) == (not found_by_scan)
    service.balance()
    await storable(service)
    await service.restart(kill=True)
    assert await served(service) == {}


@scenario()
async def test_quarantine_is_capped_and_counted(service: DeviceService) -> None:
    """Every copy is bad, all are asked for at once: each region keeps one slot out of use, the others are free."""
    await stored(service)
    for number, other in PATHS:
        service.flip(number, other, offset=4096)
        service.flip(number, offset=8192)
    service.forget_memory()
    lost = await served(service)
    assert lost == dict.fromkeys(PATHS, (0, MissReason.CORRUPT))
    for number, other in PATHS:  # the second chunks are met when their parents are there again
        assert (await service.store(service.session, number)).committed_count == 1
        assert await service.fetch(number, other) == (1, MissReason.CORRUPT)
        await service.settled(number)
    assert service.counters()["quarantined_chunks"] == 2 * len(PATHS)
    regions = service.nvme.regions.by_number.values()
    assert [len(region.quarantined) for region in regions] == [1] * len(regions)
    service.balance()
    await storable(service)


def test_two_readers_meet_the_same_bad_copy(service: DeviceService) -> None:
    """Scrub and a fetch at once: the slot is given up once, and two chunks never share it."""
    import asyncio

    async def scenario() -> None:
        await stored(service)
        service.forget_memory()
        for path in PATHS:
            service.flip(*path, offset=4096)
        jobs = [service.look(row) for row in service.device.rows() for _ in range(3)]
        await asyncio.gather(*jobs, *(service.fetch(*path) for path in PATHS))
        assert service.counters()["quarantined_chunks"] == len(PATHS)
        service.balance()
        for region in service.nvme.regions.by_number.values():
            out_of_use = [*region.free, *region.quarantined]
            assert len(out_of_use) == len(set(out_of_use))
        await storable(service)

    service.run(scenario)


@scenario()
async def test_a_bad_copy_is_written_again_from_memory(service: DeviceService) -> None:
    await stored(service)
    service.flip(PATHS[2][0], offset=4096)
    row = service.controller.parts.catalog.walk(
        [service.controller.parts.catalog.model(service.model).namespace(None, service.query(0).exactness)],
        service.query(PATHS[2][0]).digests,
    ).chains[0][0]
    assert not await service.look(row)
    assert await served(service) == {}
    assert (await service.settled(*PATHS[2])).durability is Durability.LOCAL
    service.forget_memory()
    assert await served(service) == {}
    await service.restart(kill=True)
    assert await served(service) == {}
    assert service.counters().get("quarantined_chunks", 0) == 0
    service.balance()


@pytest.mark.parametrize("start", STARTS)
@scenario()
async def test_a_deleted_region(service: DeviceService, start: str) -> None:
    await stored(service)
    victim = service.place(*PATHS[0])[0]
    await service.restart(kill=start == "scan", meanwhile=lambda: service.disk.remove(victim))
    lost = await served(service)
    assert PATHS[0] in lost
    assert len(lost) <= 3
    assert {reason for _, reason in lost.values()} == {MissReason.COLD}
    service.balance()
    await storable(service)


def swap(disk: SimulatedDisk, one: Path, other: Path) -> None:
    first, second = disk.read_file(one), disk.read_file(other)
    disk.write_file(one, second)
    disk.write_file(other, first)


@pytest.mark.parametrize("start", STARTS)
@scenario()
async def test_regions_swapped_by_name(service: DeviceService, start: str) -> None:
    """The page inside says which one it is: nothing is lost, and files made later do not meet them."""
    await stored(service)
    meanwhile = damaged(service, lambda disk, files: swap(disk, files[0], files[2]))
    await service.restart(kill=start == "scan", meanwhile=meanwhile)
    assert await served(service) == {}
    service.balance()
    # The room of swapped files is given up for another model's chunks, and used again for these.
    wide = service.of(small_spec(model_id="wide", layers=(LayerSpec(kv_heads=16, k_dim=8, v_dim=8),) * 2))
    for number in range(30):
        await wide.keep(number)
        service.balance()
    await storable(service)
    await service.restart(kill=True)
    service.balance()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("where", ["same region", "other namespace"])
@scenario()
async def test_another_chunk_in_the_slot(service: DeviceService, start: str, where: str) -> None:
    """Whole and of the same geometry, only not the chunk that was asked for."""
    twin = small_spec(model_id="twin")
    await stored(service)
    other = service.of(twin)
    await other.keep(*PATHS[3])

    source = other.place(PATHS[3][0]) if where == "other namespace" else service.place(PATHS[4][0])
    target, size = service.place(PATHS[3][0]), service.layout.total_bytes

    def replace() -> None:
        data = service.disk.read_file(source[0])[source[1] : source[1] + size]
        whole = bytearray(service.disk.read_file(target[0]))
        whole[target[1] : target[1] + size] = data
        service.disk.write_file(target[0], bytes(whole))

    await service.restart(kill=start == "scan", meanwhile=replace)
    other = service.of(twin)
    reason = MissReason.COLD if start == "scan" else MissReason.CORRUPT
    assert await served(service) == {PATHS[3]: (0, reason)}
    assert await other.fetch(*PATHS[3]) == (2, MissReason.NONE)
    service.balance()
    await storable(service)
    assert await other.fetch(*PATHS[3]) == (2, MissReason.NONE)


@scenario()
async def test_a_miss_says_so_in_a_lookup_too(service: DeviceService) -> None:
    await stored(service)
    service.forget_memory()
    service.flip(PATHS[0][0], offset=4096)
    assert await service.fetch(*PATHS[0]) == (0, MissReason.CORRUPT)
    runs = service.controller.lookups.lookup(service.query(*PATHS[0])).runs
    assert runs[0][:3] == (1, ChunkState.MISS, MissReason.CORRUPT)
