"""Directories of a later release, in use, of others, or on a device that fails: refused, and left as they are."""

from __future__ import annotations

import errno
import json
from typing import Any

import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import FaultPoints
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import Directory
from tests.scenario import scenario
from tests.simulated import SimulatedDisk, simulate
from tests.tiers.nvme.chains import PATHS, served, storable, stored
from tests.tiers.service import HOME, SEED, DeviceService, refused


@pytest.mark.parametrize("change", [{"minimum_reader": 2}, {"features": ["tomorrow"]}, {"minimum_reader": "two"}])
@scenario()
async def test_a_future_format_is_refused_and_untouched(service: DeviceService, change: dict[str, Any]) -> None:
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


@scenario()
async def test_strangers_in_the_directory_are_left_alone(service: DeviceService) -> None:
    """Also those that look like ours, and are not cut as ours could be."""
    names = ["notes.txt", "region-1-1.kvs", "region-00077-00000.kvs", "region-00078-5000.kvs", "index.new"]
    for name in names:
        service.disk.write_file(HOME / name, b"not a region" * 1000)
    await service.restart(kill=True)
    await stored(service)
    await service.restart()
    assert await served(service) == {}
    for name in names[:-1]:
        assert service.disk.read_file(HOME / name) == b"not a region" * 1000


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


@scenario()
async def test_a_device_that_fails_at_the_start_can_be_attached_later(service: DeviceService) -> None:
    """Nothing is left open, locked or running; and the chunks are there."""
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
