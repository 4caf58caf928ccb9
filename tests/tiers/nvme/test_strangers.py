"""What lies on a device and is not what this service put there: another tenant's directory, an earlier write, a
snapshot of other files."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvstore.config import PolicySettings
from kvstore.errors import DataLoss
from kvstore.seams import FaultPoints, TenantKeys
from kvstore.spec import MissReason
from kvstore.tiers import IndexColumns, NotOurs
from kvstore.tiers.nvme import Directory
from kvstore.tiers.nvme.directory import Snapshot
from kvstore.tiers.nvme.io import PosixIO, aligned
from kvstore.tiers.nvme.newest import NEWEST_FILE, Newest
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.tiers.service import HOME, KIB, SEED, DeviceService

PATH = (3, 53)


@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("", "a"), ("a", "")])
def test_another_tenants_directory_is_refused_and_untouched(first: str, second: str) -> None:
    """Its chunks have names that nobody else can ask for: a tenant that took it over would write over all of them."""
    disk = SimulatedDisk(SEED)
    theirs = Directory(HOME, disk, FaultPoints(), first)
    theirs.begin()
    theirs.end(Snapshot(IndexColumns()))
    theirs.close()
    before = {name: disk.read_file(HOME / name) for name in disk.names(HOME)}
    with pytest.raises(NotOurs, match="another tenant"):
        Directory(HOME, disk, FaultPoints(), second)
    assert {name: disk.read_file(HOME / name) for name in disk.names(HOME)} == before
    again = Directory(HOME, disk, FaultPoints(), first)
    assert again.begin() is not None
    again.close()


@pytest.mark.parametrize("start", ["snapshot", "scan"])
@scenario(lambda: DeviceService())
async def test_a_region_file_of_another_tenant_serves_nobody(
    service: DeviceService, start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole chunks under the same digests: only the names that its secret made tell them from one's own."""
    await service.keep(*PATH)
    monkeypatch.setattr("tests.tiers.service.TenantKeys", lambda: TenantKeys.derived("b", b"another secret"))
    await service.restart(kill=start == "scan")
    assert await service.fetch(*PATH) == (0, MissReason.CORRUPT)
    await service.keep(*PATH)
    await asyncio.sleep(5)  # virtual: what failed its check is erased
    service.forget_memory()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)


@scenario(lambda: DeviceService())
async def test_an_earlier_write_of_the_chunk_in_the_slot_is_not_the_chunk(service: DeviceService) -> None:
    """A device that lost a write shows what was there before: whole, and of the same name."""
    await service.keep(*PATH)
    file, offset = service.place(*PATH)
    size = service.layout.total_bytes
    earlier = service.disk.read_file(file)[offset : offset + size]
    table = service.controller.parts.catalog.table
    rows = [row for row in table.rows() if table.child_counts[row] == 0]
    for row in rows:
        service.controller.parts.movement.removal.remove(row, MissReason.EVICTED)
    await service.keep(*PATH)
    file, offset = service.place(*PATH)

    def lose_the_write() -> None:
        whole = bytearray(service.disk.read_file(file))
        assert whole[offset : offset + size] != earlier
        whole[offset : offset + size] = earlier
        service.disk.write_file(file, bytes(whole))

    await service.restart(meanwhile=lose_the_write)
    assert await service.fetch(*PATH) == (1, MissReason.CORRUPT)
    await service.keep(*PATH)
    service.forget_memory()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)


@pytest.mark.parametrize("what", ["one slot twice", "a slot beyond its file"])
@scenario(lambda: DeviceService())
async def test_a_snapshot_that_does_not_fit_the_files_is_not_believed(service: DeviceService, what: str) -> None:
    """Whole, sealed, and of other files: the slots say what is there."""
    paths = [(number, 50 + number) for number in range(4)]

    def confuse() -> None:
        directory = Directory(HOME, service.disk, FaultPoints())
        snapshot = directory.begin()
        assert snapshot is not None
        columns = snapshot.columns
        numbers = columns.residencies.copy()
        if what == "one slot twice":
            numbers[0] = numbers[1]
        else:
            numbers[0] += 1000
        columns.residencies = numbers
        directory.end(Snapshot(columns))
        directory.close()

    for path in paths:
        await service.keep(*path)
    await service.restart(meanwhile=confuse)
    assert [await service.fetch(*path) for path in paths] == [(2, MissReason.NONE)] * len(paths)
    service.balance()


def lengthen(service: DeviceService) -> None:
    """The snapshot says that its first chunk has more tokens than the model's chunks have."""
    directory = Directory(HOME, service.disk, FaultPoints())
    snapshot = directory.begin()
    assert snapshot is not None
    counts = snapshot.columns.token_counts.copy()
    counts[0] = service.spec.chunk_tokens + 1
    snapshot.columns.token_counts = counts
    directory.end(snapshot)
    directory.close()


def test_a_chunk_of_a_length_that_its_model_does_not_have_is_in_nobodys_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, sealed, and nothing that this service stored. Nobody can ask for it; rounds of checks pass it over, and it
    leaves when room is needed."""
    service = DeviceService(capacity_bytes=128 * KIB)
    policies = PolicySettings(scrub_bytes_per_s=10_000_000, canary_interval_s=0)
    monkeypatch.setattr("tests.tiers.service.PolicySettings", lambda **_: policies)

    async def scenario() -> None:
        for number in range(3):
            await service.keep(number)
        await service.restart(meanwhile=lambda: lengthen(service))
        assert await service.fetch(0) == (0, MissReason.COLD)
        await asyncio.sleep(10.0)
        assert service.controller.stats().counters["scrubbed_bytes"] > 0
        for number in range(10, 40):
            await service.keep(number)
        service.balance()

    service.run(scenario)


@scenario(lambda: DeviceService())
async def test_a_chunk_that_is_stored_anew_does_not_rest_on_a_hidden_copy(service: DeviceService) -> None:
    """The copy of another length, which nobody can ask for, is no copy of what was stored."""
    await service.keep(*PATH)
    await service.restart(meanwhile=lambda: lengthen(service))
    for path in (PATH[:1], PATH):
        await service.keep(*path)
        service.forget_memory()
    assert await service.fetch(*PATH) == (2, MissReason.NONE)
    await service.restart(kill=True)
    assert await service.fetch(*PATH) == (2, MissReason.NONE)
    service.balance()


def test_a_file_that_ends_early_is_a_loss() -> None:
    """What was not read is not bytes."""
    disk = SimulatedDisk(SEED)
    disk.make_directory(HOME)
    disk.write_file(HOME / "file", bytes(4096))
    descriptor = disk.open(HOME / "file", 0)
    for offset, size in ((0, 8192), (4096, 4096)):
        with pytest.raises(DataLoss):
            PosixIO(disk).read(descriptor, offset, aligned(size))
    target = aligned(4096)
    target[:] = 7
    PosixIO(disk).read(descriptor, 0, target)
    assert not np.any(target)


@pytest.mark.parametrize("cut", [0, 1, 47])
def test_of_a_memory_of_what_is_newest_that_was_cut_nothing_replaceable_is_believed(cut: int) -> None:
    """An empty file is not one that says nothing."""
    disk = SimulatedDisk(SEED)
    directory = Directory(HOME, disk, FaultPoints())
    whole = Newest(directory)
    whole.note({b"k" * 32: 7}, frozenset({("region", 3)}))
    data = directory.read(NEWEST_FILE)
    assert len(data) == 48
    again = Newest(directory)
    again.load()
    assert not again.is_stale(b"k" * 32, 7, ("region", 4))
    assert again.is_stale(b"k" * 32, 8, ("region", 4))
    directory.write(NEWEST_FILE, data[:cut])
    damaged = Newest(directory)
    damaged.load()
    assert damaged
    assert damaged.is_stale(b"k" * 32, 7, ("region", 4))
    assert damaged.is_stale(b"x" * 32, 7, ("region", 4))
    directory.close()
