"""What nobody of ours wrote, with every checksum right: the start does not fail, and what is stored then is kept."""

from __future__ import annotations

import json
import struct

import pytest
import xxhash

from kvstore.spec import MissReason
from tests.scenario import scenario
from tests.tiers.nvme.chains import PATHS, STARTS, served, storable, stored
from tests.tiers.service import HOME, DeviceService

INFINITE = float("inf")


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("number", [1 << 24, 1 << 29, 0xFFFFFFFF])
@scenario()
async def test_a_region_of_a_number_that_no_residency_holds(service: DeviceService, start: str, number: int) -> None:
    """It would be taken for another region's: its file is left as it is, and its chunks are misses."""
    await stored(service)
    path = service.region_files()[0]
    whole = bytearray(service.disk.read_file(path))
    struct.pack_into("<I", whole, 12, number)
    whole[40:48] = xxhash.xxh3_64_digest(bytes(whole[:40]))
    await service.restart(kill=start == "scan", meanwhile=lambda: service.disk.write_file(path, bytes(whole)))
    assert list(service.nvme.regions.away) == [path.name]
    assert {reason for _, reason in (await served(service)).values()} <= {MissReason.COLD}
    service.balance()
    await storable(service)
    assert service.disk.read_file(path) == bytes(whole)
    for kill in (True, False):
        await service.restart(kill=kill)
        assert await served(service) == {}


@pytest.mark.parametrize("token_count", [1 << 31, 0xFFFFFFFF])
@scenario()
async def test_a_chunk_of_more_tokens_than_there_can_be(service: DeviceService, token_count: int) -> None:
    await stored(service)
    file, place = service.place(*PATHS[3])
    whole = bytearray(service.disk.read_file(file))
    struct.pack_into("<I", whole, place + 40, token_count)
    whole[place + 368 : place + 384] = bytes(16)
    size = service.layout.header_bytes
    whole[place + 368 : place + 384] = xxhash.xxh3_128_digest(bytes(whole[place : place + size]))
    await service.restart(kill=True, meanwhile=lambda: service.disk.write_file(file, bytes(whole)))
    assert await served(service) == {PATHS[3]: (1, MissReason.COLD)}
    await storable(service)


@pytest.mark.parametrize("wrong", [{"unread": [[INFINITE, 0]]}, {"regions": [INFINITE]}], ids=["unread", "regions"])
@scenario()
async def test_a_snapshot_of_no_end_costs_a_scan(service: DeviceService, wrong: dict[str, object]) -> None:
    """JSON as it is read here has numbers that are none."""

    def write() -> None:
        said = json.loads(service.disk.read_file(HOME / "format"))
        part = {"clean": said["clean"], "regions": [0], "unread": []} | wrong
        service.disk.write_file(HOME / "format", json.dumps({**said, "clean": "", "part": part}).encode())

    await stored(service)
    await service.restart(meanwhile=write)
    assert await served(service) == {}
    await storable(service)
