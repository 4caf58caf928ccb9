"""The snapshot of a clean stop is used when it is good, and costs a scan when it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from kvstore.tiers.nvme import directory
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.tiers.nvme.chains import PATHS, served, storable, stored
from tests.tiers.service import HOME, DeviceService


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
@scenario()
async def test_a_damaged_snapshot_costs_a_scan(service: DeviceService, name: str, damage: str) -> None:
    await stored(service)
    before = service.nvme.statistics()
    await service.restart(meanwhile=rewrite(service, name, INDEX_DAMAGE[damage]))
    after = service.nvme.statistics()
    assert (after.allocated_bytes, after.chunk_count) == (before.allocated_bytes, before.chunk_count)
    assert await served(service) == {}
    service.balance()
    await storable(service)


def of_an_unknown_provenance(data: bytes) -> bytes:
    """The first namespace is of a third one."""
    at = directory._INDEX_HEAD.size + 32
    return data[:at] + b"\x02" + data[at + 1 :]


def of_an_unknown_namespace(data: bytes) -> bytes:
    columns = directory._unpack(data)
    assert columns is not None
    return directory._pack(replace(columns, spaces=columns.spaces + 1))


@pytest.mark.parametrize("change", [of_an_unknown_provenance, of_an_unknown_namespace])
@scenario()
async def test_a_snapshot_that_names_what_is_not_known_costs_a_scan(
    service: DeviceService, change: Callable[[bytes], bytes]
) -> None:
    """Its checksum is right: another release wrote it."""

    def written(data: bytes) -> bytes:
        index = change(service.disk.read_file(HOME / "index"))
        service.disk.write_file(HOME / "index", index)
        return json.dumps({**json.loads(data), "clean": xxhash.xxh3_128_hexdigest(index)}).encode()

    await stored(service)
    await service.restart(meanwhile=rewrite(service, "format", written))
    assert await served(service) == {}
    service.balance()


@pytest.mark.parametrize("name", ["index", "format"])
@scenario()
async def test_a_deleted_snapshot_costs_a_scan(service: DeviceService, name: str) -> None:
    await stored(service)
    await service.restart(meanwhile=lambda: service.disk.remove(HOME / name))
    assert await served(service) == {}
    service.balance()


@pytest.mark.parametrize("kill", [False, True])
@scenario()
async def test_a_snapshot_of_another_time_is_not_believed(service: DeviceService, kill: bool) -> None:
    """An older copy of the index is put back, after a clean stop or a kill: chunks stored since are there."""
    old: list[bytes] = []
    for path in PATHS[:4]:
        await service.keep(*path)
    await service.restart(meanwhile=lambda: old.append(service.disk.read_file(HOME / "index")))
    for path in PATHS[4:]:
        await service.keep(*path)
    await service.restart(kill=kill, meanwhile=lambda: service.disk.write_file(HOME / "index", old[0]))
    assert await served(service) == {}
    service.balance()


@scenario()
async def test_a_snapshot_is_used_when_it_is_good(service: DeviceService) -> None:
    """Or else all of the above would prove nothing: with it no header is read."""
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
