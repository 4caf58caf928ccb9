"""Bad input on the device: what is damaged is a miss with a reason, what is not is served, and the service is up."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.chunk import Trust
from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import FaultPoints
from kvstore.simulated import SimulatedDisk, simulate
from kvstore.spec import ChunkState, Durability, LayerSpec, MissReason
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import Directory
from tests.chunk.test_envelope import ring
from tests.specs import small_spec
from tests.tiers.service import HOME, KIB, SEED, DeviceService, refused

PATHS = [(number, 50 + number) for number in range(10)]
"""Ten chains of two chunks each."""
STARTS = ["snapshot", "scan"]


@pytest.fixture
def service() -> DeviceService:
    return DeviceService(arena_chunks=32)


async def stored(service: DeviceService) -> None:
    for path in PATHS:
        await service.keep(*path)


async def served(service: DeviceService) -> dict[tuple[int, ...], tuple[int, MissReason]]:
    """Chains that do not come back whole: how far they do, and why no further."""
    outcomes = {path: await service.fetch(*path) for path in PATHS}
    return {path: outcome for path, outcome in outcomes.items() if outcome[0] < len(path)}


async def storable(service: DeviceService) -> None:
    """Every chain can be stored again at once, and is whole then, also from the device."""
    for path in PATHS:
        await service.keep(*path)
    service.forget_memory()
    assert await served(service) == {}
    service.balance()


def damaged(service: DeviceService, how: Callable[[SimulatedDisk, list[Path]], None]) -> Callable[[], None]:
    return lambda: how(service.disk, service.region_files())


@pytest.mark.parametrize("start", STARTS)
def test_a_truncated_region(service: DeviceService, start: str) -> None:
    """Its chunks up to the cut are there."""

    def cut(disk: SimulatedDisk, files: list[Path]) -> None:
        disk.write_file(files[1], disk.read_file(files[1])[: 4096 + 2 * 12288 + 5000])

    async def scenario() -> None:
        await stored(service)
        await service.restart(kill=start == "scan", meanwhile=damaged(service, cut))
        assert 0 < len(await served(service)) <= 2
        service.balance()
        await storable(service)

    service.run(scenario)


@pytest.mark.parametrize("left", [0, 100, 4096, 4097])
@pytest.mark.parametrize("start", STARTS)
def test_a_region_of_which_nearly_nothing_is_left(service: DeviceService, start: str, left: int) -> None:
    def cut(disk: SimulatedDisk, files: list[Path]) -> None:
        disk.write_file(files[0], disk.read_file(files[0])[:left])

    async def scenario() -> None:
        await stored(service)
        await service.restart(kill=start == "scan", meanwhile=damaged(service, cut))
        lost = await served(service)
        assert 0 < len(lost) <= 3
        assert {reason for _, reason in lost.values()} <= {MissReason.COLD, MissReason.CORRUPT}
        service.balance()
        await storable(service)

    service.run(scenario)


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
def test_a_flipped_chunk(service: DeviceService, start: str, offset: int) -> None:
    """Header or body, first chunk of a chain: the chain is a miss, its slot rests, the key can be stored again."""

    async def scenario() -> None:
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

    service.run(scenario)


def test_quarantine_is_capped_and_counted(service: DeviceService) -> None:
    """Every copy is bad, all are asked for at once: each region keeps one slot out of use, the others are free."""

    async def scenario() -> None:
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

    service.run(scenario)


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


def test_a_bad_copy_is_written_again_from_memory(service: DeviceService) -> None:
    async def scenario() -> None:
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

    service.run(scenario)


@pytest.mark.parametrize("start", STARTS)
def test_a_deleted_region(service: DeviceService, start: str) -> None:
    async def scenario() -> None:
        await stored(service)
        victim = service.place(*PATHS[0])[0]
        await service.restart(kill=start == "scan", meanwhile=lambda: service.disk.remove(victim))
        lost = await served(service)
        assert PATHS[0] in lost
        assert len(lost) <= 3
        assert {reason for _, reason in lost.values()} == {MissReason.COLD}
        service.balance()
        await storable(service)

    service.run(scenario)


def swap(disk: SimulatedDisk, one: Path, other: Path) -> None:
    first, second = disk.read_file(one), disk.read_file(other)
    disk.write_file(one, second)
    disk.write_file(other, first)


@pytest.mark.parametrize("start", STARTS)
def test_regions_swapped_by_name(service: DeviceService, start: str) -> None:
    """The page inside says which one it is: nothing is lost, and files made later do not meet them."""

    async def scenario() -> None:
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

    service.run(scenario)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("where", ["same region", "other namespace"])
def test_another_chunk_in_the_slot(service: DeviceService, start: str, where: str) -> None:
    """Whole and of the same geometry, only not the chunk that was asked for."""
    twin = small_spec(model_id="twin")

    async def scenario() -> None:
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

    service.run(scenario)


# ---------------------------------------------------------------- the snapshot


def rewrite(service: DeviceService, name: str, change: Callable[[bytes], bytes]) -> Callable[[], None]:
    return lambda: service.disk.write_file(HOME / name, change(service.disk.read_file(HOME / name)))


INDEX_DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "cut by a row": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "flipped head": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "flipped row": lambda data: data[:-40] + bytes([data[-40] ^ 0x80]) + data[-39:],
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("name", ["index", "format"])
@pytest.mark.parametrize("damage", INDEX_DAMAGE)
def test_a_damaged_snapshot_costs_a_scan(service: DeviceService, name: str, damage: str) -> None:
    async def scenario() -> None:
        await stored(service)
        before = service.nvme.statistics()
        await service.restart(meanwhile=rewrite(service, name, INDEX_DAMAGE[damage]))
        after = service.nvme.statistics()
        assert (after.allocated_bytes, after.chunk_count) == (before.allocated_bytes, before.chunk_count)
        assert await served(service) == {}
        service.balance()
        await storable(service)

    service.run(scenario)


@pytest.mark.parametrize("name", ["index", "format"])
def test_a_deleted_snapshot_costs_a_scan(service: DeviceService, name: str) -> None:
    async def scenario() -> None:
        await stored(service)
        await service.restart(meanwhile=lambda: service.disk.remove(HOME / name))
        assert await served(service) == {}
        service.balance()

    service.run(scenario)


@pytest.mark.parametrize("kill", [False, True])
def test_a_snapshot_of_another_time_is_not_believed(service: DeviceService, kill: bool) -> None:
    """An older copy of the index is put back, after a clean stop or a kill: chunks stored since are there."""
    old: list[bytes] = []

    async def scenario() -> None:
        for path in PATHS[:4]:
            await service.keep(*path)
        await service.restart(meanwhile=lambda: old.append(service.disk.read_file(HOME / "index")))
        for path in PATHS[4:]:
            await service.keep(*path)
        await service.restart(kill=kill, meanwhile=lambda: service.disk.write_file(HOME / "index", old[0]))
        assert await served(service) == {}
        service.balance()

    service.run(scenario)


def test_a_snapshot_is_used_when_it_is_good(service: DeviceService) -> None:
    """Or else all of the above would prove nothing: with it no header is read."""

    async def scenario() -> None:
        await stored(service)
        broken = SimulatedDisk.pread

        def no_headers(disk: SimulatedDisk, descriptor: int, buffer: memoryview, offset: int) -> int:
            if "region" in disk._find(descriptor).path.name:
                assert offset == 0, "a slot was read"
            return broken(disk, descriptor, buffer, offset)

        with pytest.MonkeyPatch.context() as patch:
            await service.stop()
            patch.setattr(SimulatedDisk, "pread", no_headers)
            await service.start()
        assert await served(service) == {}

    service.run(scenario)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("change", [{"minimum_reader": 2}, {"features": ["tomorrow"]}, {"minimum_reader": "two"}])
def test_a_future_format_is_refused_and_untouched(service: DeviceService, change: dict[str, Any]) -> None:
    async def scenario() -> None:
        await stored(service)
        await service.stop()
        said = json.loads(service.disk.read_file(HOME / "format"))
        service.disk.write_file(HOME / "format", json.dumps({**said, "format": 2, **change}).encode())
        before = {name: service.disk.read_file(HOME / name) for name in service.disk.names(HOME)}
        for _ in range(2):
            error = await refused(service)
            assert isinstance(error, NotOurs)
            assert "a newer kvstore" in error.message
            assert "tiers.nvme.directory" in error.message
        after = {name: service.disk.read_file(HOME / name) for name in service.disk.names(HOME)}
        assert after == before
        service.disk.write_file(HOME / "format", json.dumps(said).encode())
        await service.start()
        assert await served(service) == {}

    service.run(scenario)


def test_a_region_of_a_future_format_is_left_alone(service: DeviceService) -> None:
    import struct

    import xxhash

    async def scenario() -> None:
        await stored(service)
        victim = service.place(*PATHS[0])[0]

        def renew() -> None:
            data = service.disk.read_file(victim)
            fields = list(struct.unpack("<8sHHIQQQ", data[:40]))
            fields[1] = fields[2] = 2
            head = struct.pack("<8sHHIQQQ", *fields)
            service.disk.write_file(victim, head + xxhash.xxh3_64_digest(head) + data[48:])

        await service.restart(kill=True, meanwhile=renew)
        before = service.disk.read_file(victim)
        lost = await served(service)
        assert PATHS[0] in lost
        assert len(lost) <= 3
        await storable(service)
        assert service.disk.read_file(victim) == before
        assert service.region_bytes_used() <= service.capacity_bytes

    service.run(scenario)


def test_strangers_in_the_directory_are_left_alone(service: DeviceService) -> None:
    """Also those that look like ours, and are not cut as ours could be."""
    names = ["notes.txt", "region-1-1.kvs", "region-00077-00000.kvs", "region-00078-5000.kvs", "index.new"]

    async def scenario() -> None:
        for name in names:
            service.disk.write_file(HOME / name, b"not a region" * 1000)
        await service.restart(kill=True)
        await stored(service)
        await service.restart()
        assert await served(service) == {}
        for name in names[:-1]:
            assert service.disk.read_file(HOME / name) == b"not a region" * 1000

    service.run(scenario)


def test_one_directory_one_service() -> None:
    async def scenario() -> None:
        disk = SimulatedDisk(SEED)
        first = Directory(HOME, disk, FaultPoints())
        with pytest.raises(Unavailable, match="another kvstore server"):
            Directory(HOME, disk, FaultPoints())
        first.close()
        first.close()
        Directory(HOME, disk, FaultPoints()).close()

    simulate(scenario(), seed=SEED)


def test_a_device_that_fails_at_the_start_can_be_attached_later(service: DeviceService) -> None:
    """Nothing is left open, locked or running; and the chunks are there."""

    async def scenario() -> None:
        await stored(service)
        await service.stop()
        for method in ("names", "sync_directory"):
            service.disk.fail(method, errno.EIO)
            error = await refused(service)
            assert isinstance(error, KVStoreError)
            assert "tiers.nvme.directory" in error.message
            service.disk.mend()
        await service.start()
        assert await served(service) == {}

    service.run(scenario)


# ---------------------------------------------------------------- the cap


@pytest.mark.parametrize("capacity_bytes", [4096, 8192, 12288, 4096 + 12287])
def test_a_cap_below_one_chunk(capacity_bytes: int) -> None:
    """Nothing fits: chunks stay in memory, and why is said."""
    service = DeviceService(capacity_bytes=capacity_bytes)

    async def scenario() -> None:
        assert (await service.store(service.session, 1)).committed_count == 1
        settled = await service.settled(1)
        assert settled.durability is Durability.MEMORY
        assert "tiers.nvme.capacity_bytes" in settled.reason
        assert await service.fetch(1) == (1, MissReason.NONE)
        assert service.region_files() == []
        service.balance()

    service.run(scenario)


@pytest.mark.parametrize("start", STARTS)
def test_a_lowered_cap_is_kept_at_once(service: DeviceService, start: str) -> None:
    async def scenario() -> None:
        await stored(service)
        whole = service.region_bytes_used()
        for capacity in (whole, whole - 1, whole // 2, 70 * KIB, 4 * KIB):
            service.capacity_bytes = capacity
            await service.restart(kill=start == "scan")
            service.balance()
            lost = await served(service)
            assert bool(lost) == (capacity < whole)
            assert {reason for _, reason in lost.values()} <= {MissReason.COLD}
            service.forget_memory()
            # What the smaller files kept is served again and again, and every row has its place.
            assert await served(service) == lost
        service.capacity_bytes = 512 * KIB
        await service.restart()
        await storable(service)

    service.run(scenario)


def on_device(service: DeviceService) -> set[tuple[bytes, bytes]]:
    """Namespace and digest of every chunk that the device holds."""
    table, spaces = service.controller.parts.catalog.table, service.controller.parts.catalog.spaces.numbered
    rows = list(service.device.rows())
    return {(spaces[table.spaces[row]].fingerprint, table.digests[row]) for row in rows}


def test_five_times_the_capacity_of_mixed_sizes_stays_below_the_cap() -> None:
    """Slot sizes take turns, so that regions are given up for each other; after every store the files are measured."""
    service = DeviceService(arena_chunks=24, capacity_bytes=300 * KIB, region_bytes=80 * KIB)
    sizes = [
        small_spec(model_id=f"size {layers}.{heads}", layers=(LayerSpec(kv_heads=heads, k_dim=8, v_dim=8),) * layers)
        for layers, heads in ((2, 2), (4, 2), (2, 12), (7, 3), (1, 2))
    ]

    async def scenario() -> None:
        written = number = 0
        while written < 5 * service.capacity_bytes:
            view = service.of(sizes[number // 7 % len(sizes)])
            await view.keep(number)
            number += 1
            written += view.layout.total_bytes
            service.balance()
            assert await view.fetch(number - 1) == (1, MissReason.NONE)
        assert service.counters()["nvme_evicted_chunks"] > 20
        before = service.nvme.statistics()
        for kill in (False, True):
            held = on_device(service)
            await service.restart(kill=kill)
            service.balance()
            after = service.nvme.statistics()
            assert after.file_bytes == before.file_bytes
            assert after.overhead_bytes == before.overhead_bytes
            assert on_device(service) >= held
            if not kill:
                assert on_device(service) == held
                assert after.allocated_bytes == before.allocated_bytes

    service.run(scenario)


def test_a_miss_says_so_in_a_lookup_too(service: DeviceService) -> None:
    async def scenario() -> None:
        await stored(service)
        service.forget_memory()
        service.flip(PATHS[0][0], offset=4096)
        assert await service.fetch(*PATHS[0]) == (0, MissReason.CORRUPT)
        runs = service.controller.lookup(service.query(*PATHS[0])).runs
        assert runs[0][:3] == (1, ChunkState.MISS, MissReason.CORRUPT)

    service.run(scenario)


# ---------------------------------------------------------------- how old chunks are


def ages(service: DeviceService) -> set[float]:
    """When the chunks that are stored came, in seconds of the service's clock."""
    table = service.parts.catalog.table
    return {table.stored_s[row] for row in table.rows() if table.is_resident(row)}


@pytest.mark.parametrize("envelope", ["none", "mac"])
@pytest.mark.parametrize("start", STARTS)
def test_a_chunk_is_as_old_after_a_restart_as_it_is(start: str, envelope: str) -> None:
    trust = None if envelope == "none" else Trust(envelope, ring())
    service = DeviceService(arena_chunks=32, trust=trust)

    async def scenario() -> None:
        await service.clock.sleep(1000)
        await service.keep(1, 2)
        first = ages(service)
        await service.clock.sleep(5000)
        await service.keep(3)
        came = ages(service)
        assert len(came) == 2
        assert all(each >= 1000 for each in first)
        for _ in range(2):  # what a start found is as old after the next one, too
            await service.restart(kill=start == "scan")
            await service.clock.sleep(500)
            assert ages(service) == came

    service.run(scenario)


@pytest.mark.parametrize("how", ["gone", "another's", "cut"])
def test_without_its_times_a_snapshot_is_read_and_ages_are_not_known(service: DeviceService, how: str) -> None:
    def harm() -> None:
        path = HOME / "times"
        if how == "gone":
            service.disk.remove(path)
        else:
            data = service.disk.read_file(path)
            service.disk.write_file(path, data[:-1] if how == "cut" else bytes(16) + data[16:])

    async def scenario() -> None:
        await service.clock.sleep(1000)
        await stored(service)
        await service.restart(meanwhile=harm)
        assert ages(service) == {0}
        assert await served(service) == {}

    service.run(scenario)
