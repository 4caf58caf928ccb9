"""Never an older value: once another one was stored under its key, a value does not come back, whatever the device
refused meanwhile and however the process ended."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from kvstore.chunk import read_seat, write_seat
from kvstore.errors import KVStoreError
from kvstore.seams import FaultPoints
from kvstore.spec import Durability
from kvstore.tiers import NotOurs
from kvstore.tiers.nvme import Directory, directory, newest
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.tiers.service import HOME, refused
from tests.tiers.values import ValueService

RETRY_S = 15.0
OLD, NEW = 1, 2
Way = Callable[[ValueService, int | None], Awaitable[None]]


async def a_sync_failed(service: ValueService, times: int | None) -> None:
    """The write is whole on the device, in a slot that nobody uses."""
    service.disk.fail("sync", errno.EIO, path_contains="region-00000", times=times)
    assert await service.put(OLD) is Durability.MEMORY


async def a_sync_failed_and_another_region_took_it(service: ValueService, times: int | None) -> None:
    await a_sync_failed(service, times)
    await asyncio.sleep(RETRY_S)
    assert await service.level() is Durability.LOCAL


async def an_erasure_is_refused(service: ValueService, times: int | None) -> None:
    assert await service.put(OLD) is Durability.LOCAL
    service.disk.fail("pwrite", errno.EIO, path_contains="region-00000", times=times)


async def an_erasure_is_not_synced(service: ValueService, times: int | None) -> None:
    assert await service.put(OLD) is Durability.LOCAL
    service.disk.fail("sync", errno.EIO, path_contains="region-00000", times=times)


async def an_evicted_value_is_not_erased(service: ValueService, times: int | None) -> None:
    await an_erasure_is_refused(service, times)
    service.evict()
    await service.nvme.erasures.erase_doomed()


async def the_file_does_not_open(service: ValueService, times: int | None) -> None:
    assert await service.put(OLD) is Durability.LOCAL
    await service.stop()
    service.disk.fail("open", errno.EMFILE, path_contains="region-00000", times=times)
    await service.start()
    assert await service.get() is None


async def the_header_is_not_read(service: ValueService, times: int | None) -> None:
    assert await service.put(OLD) is Durability.LOCAL
    await service.stop(kill=True)
    service.disk.fail("pread", errno.EIO, path_contains="region-00000", after=1, times=9 if times else None)
    await service.start()
    assert await service.get() is None


async def a_bad_copy_is_not_erased(service: ValueService, times: int | None) -> None:
    """A reader got other bytes than lie there."""
    assert await service.put(OLD) is Durability.LOCAL
    row, device = service.row(), service.device
    service.disk.fail("pwrite", errno.EIO, path_contains="region-00000", times=times)
    service.drop(row)
    await service.controller.parts.movement.removal.quarantine(device, row, device.residency(row))


async def the_device_wrote_it_to_another_place_too(service: ValueService, times: int | None) -> None:
    """Over another key's value, and said nothing."""
    assert await service.put(OLD) is Durability.LOCAL
    assert await service.put(7, "third") is Durability.LOCAL
    (_, source), (_, target) = service.place_of(), service.place_of("third")
    region, _ = service.nvme.regions.find(service.device.residency(service.row()))
    data = bytearray(service.disk.read_file(region.path))
    data[target : target + region.slot_bytes] = data[source : source + region.slot_bytes]
    service.disk.write_file(region.path, bytes(data))


WAYS: list[Way] = [
    a_sync_failed, a_sync_failed_and_another_region_took_it, an_erasure_is_refused, an_erasure_is_not_synced,
    an_evicted_value_is_not_erased, the_file_does_not_open, the_header_is_not_read, a_bad_copy_is_not_erased,
    the_device_wrote_it_to_another_place_too,
]  # fmt: skip


@pytest.mark.parametrize("fate", ["is kept", "is evicted", "is in memory only"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "for good"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_older_value_never_comes_back(way: Way, times: int | None, fate: str) -> None:
    """The device refuses ``once``, or ``for good`` until the process has ended. The newer value is then kept, evicted
    by the policy, or never reaches the device. However that life ends, three more follow."""
    for ending in ("kill", "power cut", "clean stop"):
        service = ValueService()

        async def scenario(service: ValueService = service, ending: str = ending) -> None:
            assert await service.put(9, "other") is Durability.LOCAL
            await way(service, times)
            if fate == "is in memory only":
                service.disk.fail("pwrite", errno.EIO, path_contains="region", times=None)
                service.disk.fail("allocate", errno.EIO, times=None)
            level = await service.put(NEW)
            if level is not Durability.LOCAL and fate != "is in memory only":
                await asyncio.sleep(RETRY_S)
                level = await service.level()
            assert (level is Durability.LOCAL) == (fate != "is in memory only")
            if fate == "is evicted":
                service.evict()
                await asyncio.sleep(RETRY_S)
            for end in (ending, "kill", "power cut", "clean stop"):
                await service.stop(kill=end != "clean stop")
                if end == "power cut":
                    service.disk.crash()
                service.disk.mend()
                await service.start()
                found = await service.get()
                assert found != OLD, f"after a {end}"
                assert found == NEW or fate != "is kept", f"after a {end}"
                assert await service.get("other") == 9
            service.balance()

        service.run(scenario)


@pytest.mark.parametrize("seat", [0, 5], ids=["an earlier release wrote it", "it lies in another place"])
def test_a_value_says_where_it_was_written(seat: int) -> None:
    """One that does not say is believed; one that says another place is not, whether by a scan or by a snapshot."""
    for kill in (True, False):
        service = ValueService()

        async def scenario(service: ValueService = service, kill: bool = kill) -> None:
            assert await service.put(OLD) is Durability.LOCAL
            region, slot = service.nvme.regions.find(service.device.residency(service.row()))
            await service.stop(kill=kill)
            path, offset = region.path, region.offset(slot)
            data = bytearray(service.disk.read_file(path))
            header = np.frombuffer(data, np.uint8)[offset : offset + service.layout.header_bytes]
            assert read_seat(header) not in (0, 5)
            write_seat(header, seat)
            service.disk.write_file(path, bytes(data))
            await service.start()
            assert await service.get() == (OLD if seat == 0 else None)

        service.run(scenario)


@scenario(lambda: ValueService())
async def test_once_everything_was_seen_nothing_is_remembered(service: ValueService) -> None:
    """And slots that could not be erased are used again."""
    await the_file_does_not_open(service, 1)
    for value in (NEW, 3):
        assert await service.put(value) is Durability.LOCAL
    assert newest.NEWEST_FILE in service.disk.names(service.nvme.regions._directory)
    for kill in (False, True):
        await service.restart(kill=kill)
        assert await service.get() == 3
        assert newest.NEWEST_FILE not in service.disk.names(service.nvme.regions._directory)
        assert service.nvme.statistics().chunk_count == 1
    service.balance()


@scenario(lambda: ValueService())
async def test_a_key_that_is_remembered_for_too_long_takes_newer_values(service: ValueService) -> None:
    """Everything was seen, and the file could not be removed."""
    await the_file_does_not_open(service, 1)
    assert await service.put(NEW) is Durability.LOCAL
    service.disk.fail("remove", errno.EIO, path_contains=newest.NEWEST_FILE)
    await service.restart(kill=True)
    assert await service.put(3) is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.get() == 3


@scenario(lambda: ValueService())
async def test_what_was_refused_is_erased_as_soon_as_the_device_takes_it(service: ValueService) -> None:
    await an_erasure_is_refused(service, None)
    assert await service.put(NEW) is Durability.MEMORY
    resting = service.nvme.statistics().quarantined_bytes
    assert resting > 0
    service.disk.mend()
    await asyncio.sleep(2 * RETRY_S)
    assert service.nvme.erasures.is_tidy
    assert await service.level() is Durability.LOCAL
    service.balance()


@scenario(lambda: ValueService())
async def test_a_value_that_cannot_be_told_from_an_older_one_is_refused(service: ValueService) -> None:
    """The device can neither erase nor write anything down: the caller hears of it, and finds no value afterwards."""
    assert await service.put(OLD) is Durability.LOCAL
    service.disk.fail("pwrite", errno.EIO, times=None)
    with pytest.raises(KVStoreError):
        await service.put(NEW)
    assert await service.get() is None
    service.disk.mend()
    assert await service.put(3) is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.get() == 3


@pytest.mark.parametrize("is_damaged", [False, True], ids=["kept", "damaged"])
def test_more_keys_than_are_remembered(monkeypatch: pytest.MonkeyPatch, is_damaged: bool) -> None:
    """Then nothing of the places that nobody can see is believed; nor is it where the file is damaged. What is seen is
    kept, in each case but the last."""
    monkeypatch.setattr(newest, "COUNT_MAX", 4)
    service = ValueService()

    async def scenario() -> None:
        keys = [f"key {number}" for number in range(8)]
        for key in keys[:3]:
            assert await service.put(OLD, key) is Durability.LOCAL
        name = service.place_of(keys[0])[0]
        await service.stop()
        service.disk.fail("open", errno.EACCES, path_contains=name, times=None)
        await service.start()
        for key in keys:
            assert await service.put(NEW, key) is Durability.LOCAL
        await service.restart(kill=True)
        for key in keys:
            assert await service.get(key) == NEW
        await service.stop(kill=True)
        service.disk.mend()
        if is_damaged:
            file = service.nvme.regions._directory / newest.NEWEST_FILE
            service.disk.flip(file, 3)
        await service.start()
        for key in keys:
            assert await service.get(key) == (None if is_damaged else NEW)
            assert await service.put(3, key) is Durability.LOCAL
        await service.restart(kill=True)
        for key in keys:
            assert await service.get(key) == 3
        service.balance()

    service.run(scenario)


@scenario(lambda: ValueService())
async def test_of_two_writes_of_one_key_that_nobody_can_order_neither_is_served(service: ValueService) -> None:
    """As a release without ``newest`` could leave them."""
    assert await service.put(OLD) is Durability.LOCAL
    name, offset = service.place_of()
    file = service.nvme.regions._directory / name
    size = service.layout.total_bytes
    old = np.frombuffer(bytearray(service.disk.read_file(file)[offset : offset + size]), np.uint8)
    write_seat(old[: service.layout.header_bytes], 0)  # which such a release did not write
    assert await service.put(NEW) is Durability.LOCAL
    assert service.place_of() == (name, offset)

    def left_over() -> None:
        data = bytearray(service.disk.read_file(file))
        data[offset + size : offset + 2 * size] = old.data
        service.disk.write_file(file, bytes(data))

    await service.restart(kill=True, meanwhile=left_over)
    assert await service.get() is None
    assert await service.put(3) is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.get() == 3
    service.balance()


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "clean stop"])
@scenario(lambda: ValueService())
async def test_a_release_that_does_not_know_which_is_the_newest_does_not_open_the_directory(
    service: ValueService, monkeypatch: pytest.MonkeyPatch, kill: bool
) -> None:
    """It would serve the older value, and what it stored would not be believed afterwards. Once everything was seen it
    opens it again."""
    await the_file_does_not_open(service, 1)
    assert await service.put(NEW) is Durability.LOCAL
    await service.stop(kill=kill)
    with monkeypatch.context() as earlier:
        earlier.setattr(directory, "KNOWN_FEATURES", frozenset())
        assert isinstance(await refused(service), NotOurs)
    await service.start()
    assert await service.get() == NEW
    await service.stop()
    with monkeypatch.context() as earlier:
        earlier.setattr(directory, "KNOWN_FEATURES", frozenset())
        await service.start()
        assert await service.get() == NEW


@scenario(lambda: ValueService())
async def test_no_newer_value_is_promised_where_the_format_cannot_say_so(service: ValueService) -> None:
    await the_file_does_not_open(service, 1)
    service.disk.fail("rename", errno.EIO, path_contains="format")
    with pytest.raises(KVStoreError):
        await service.put(NEW)
    assert newest.NEWEST_FILE not in service.disk.names(HOME)
    assert await service.put(NEW) is Durability.LOCAL
    await service.restart(kill=True)
    assert await service.get() == NEW


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "clean stop"])
@scenario(lambda: ValueService())
async def test_a_file_that_is_given_up_and_stays(service: ValueService, kill: bool) -> None:
    """An older value lies in it that could not be erased, and nobody takes the file away."""
    await an_erasure_is_refused(service, 1)
    service.evict()
    await service.nvme.erasures.erase_doomed()
    regions = service.nvme.regions
    regions.retire(regions.by_number[0])
    assert await service.put(NEW) is Durability.LOCAL
    for _ in range(2):
        await service.restart(kill=kill)
        assert await service.get() == NEW
    service.balance()


def test_what_is_said_of_a_file_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of which nothing is believed is given up: values in the one that takes its place are."""
    monkeypatch.setattr(newest, "COUNT_MAX", 1)
    service = ValueService()

    async def scenario() -> None:
        assert await service.put(9, "other") is Durability.LOCAL
        await a_sync_failed(service, None)
        for key in ("a", "b"):
            assert await service.put(NEW, key) is Durability.LOCAL
        service.disk.mend()
        service.evict("other")
        await service.nvme.erasures.erase_doomed()
        regions, keys = service.nvme.regions, [f"key {number}" for number in range(8)]
        given_up = regions.by_number[0]
        regions.retire(given_up)
        regions.remove_file(given_up)
        for key in keys:
            assert await service.put(NEW, key) is Durability.LOCAL
        await service.restart(kill=True)
        for key in keys:
            assert await service.get(key) == NEW

    service.run(scenario)


@pytest.mark.parametrize("left", [0, 5, 50])
def test_a_file_that_is_cut_short_believes_nothing(left: int) -> None:
    disk = SimulatedDisk(1)
    directory = Directory(HOME, disk, FaultPoints())
    newest.Newest(directory).note({bytes(32): NEW, bytes([1] * 32): NEW}, frozenset({("region", 0)}))
    data = disk.read_file(HOME / newest.NEWEST_FILE)
    for size, is_damaged in ((len(data), False), (left, True)):
        disk.write_file(HOME / newest.NEWEST_FILE, data[:size])
        found = newest.Newest(directory)
        found.load()
        assert found.is_stale(bytes([2] * 32), NEW, ("another", 0)) == is_damaged
        assert found.is_stale(bytes(32), OLD, ("another", 0))
