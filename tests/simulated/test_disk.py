"""What a simulated disk may lose, and what it must not: over many seeds, each outcome that is allowed occurs, and no
other."""

from __future__ import annotations

import errno
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.seams.test_disk_contract import CREATE, put, read, write
from tests.simulated import SimulatedDisk
from tests.simulated.lives import FILE, HOME, NEW, OLD, SEEDS, outcomes, over_seeds, sectors


def test_what_was_synced_survives() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW)
        disk.allocate(file, 5000)
        disk.sync(file)

    assert outcomes(lived) == {NEW + bytes(5000 - 4096)}


def test_what_was_not_synced_is_kept_lost_or_torn_at_sectors() -> None:
    found = outcomes(lambda disk, file: write(disk, file, NEW))
    assert {OLD, NEW} <= found
    torn = found - {OLD, NEW}
    assert len(torn) > 5
    assert all(sector in (OLD[:512], NEW[:512]) for each in torn for sector in sectors(each))


def test_sectors_are_the_file_s_not_the_write_s() -> None:
    disks = over_seeds(lambda disk, file: write(disk, file, NEW[:1024], 256), range(300))
    found = {disk.read_file(FILE) for disk in disks}
    edges = {(each[256:512], each[512:1024], each[1024:1280]) for each in found}
    assert len(edges) == 8
    assert all(len(set(part)) == 1 for parts in edges for part in parts)


def test_one_sector_is_never_torn() -> None:
    found = outcomes(lambda disk, file: write(disk, file, b"n" * 512, 512))
    assert found == {OLD, OLD[:512] + b"n" * 512 + OLD[1024:]}


def test_a_later_write_may_survive_an_earlier_one() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, b"1" * 512, 0)
        write(disk, file, b"2" * 512, 512)

    assert {(each[:1], each[512:513]) for each in outcomes(lived)} == {
        (b"o", b"o"),
        (b"1", b"o"),
        (b"o", b"2"),
        (b"1", b"2"),
    }


def test_overlapping_writes_reach_the_device_in_any_order() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, b"1" * 512)
        write(disk, file, b"2" * 512)

    assert {each[:1] for each in outcomes(lived)} == {b"o", b"1", b"2"}


def test_an_unsynced_truncation_or_allocation_may_have_happened() -> None:
    assert outcomes(lambda disk, _: disk.close(disk.open(FILE, os.O_RDWR | os.O_TRUNC))) == {OLD, b""}
    assert outcomes(lambda disk, file: disk.allocate(file, 8192)) == {OLD, OLD + bytes(4096)}


def test_a_truncation_does_not_bring_back_what_it_cut() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW)
        disk.close(disk.open(FILE, os.O_RDWR | os.O_TRUNC))
        disk.allocate(file, 4096)
        disk.sync(file)

    assert outcomes(lived) == {bytes(4096)}


def test_a_file_may_be_longer_than_what_reached_the_device() -> None:
    found = outcomes(lambda disk, file: write(disk, file, b"n" * 512, 4096))
    assert found == {OLD, OLD + bytes(512), OLD + b"n" * 512}


def test_a_sync_is_of_one_file() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        other = disk.open(HOME / "other", CREATE)
        write(disk, other, NEW)
        disk.sync_directory(HOME)
        disk.sync(file)

    assert len({disk.read_file(HOME / "other") for disk in over_seeds(lived)}) > 2


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_what_a_sync_failed_to_write_no_later_sync_writes(error: int) -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW)
        disk.fail("sync", error)
        with pytest.raises(OSError) as raised:
            disk.sync(file)
        assert raised.value.errno == error
        assert read(disk, file, 4096) == NEW
        disk.sync(file)
        assert read(disk, file, 4096) == NEW

    found = outcomes(lived)
    assert {OLD, NEW} < found


def test_after_a_failed_sync_what_is_written_again_is_synced_again() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW + NEW)
        disk.fail("sync", errno.EIO)
        with pytest.raises(OSError):
            disk.sync(file)
        write(disk, file, b"2" * 512)
        disk.sync(file)

    found = outcomes(lived)
    assert {(each[:512], len(each)) for each in found} == {(b"2" * 512, 8192)}
    assert len(found) > 2


def test_a_file_put_there_by_a_test_is_there_for_good() -> None:
    for seed in SEEDS:
        disk = SimulatedDisk(seed)
        disk.make_directory(HOME)
        put(disk, FILE, OLD)
        disk.write_file(FILE, b"new")
        disk.write_file(HOME / "deep" / "er" / "file", b"")
        disk.crash()
        assert disk.read_file(FILE) == b"new"
        assert disk.names(HOME) == ["deep", "file"]
        assert disk.steps == 3  # the directory, and what put did


def test_direct_io_is_aligned() -> None:
    disk = SimulatedDisk(1)
    disk.write_file(FILE, OLD)
    file = disk.open(FILE, os.O_RDWR | os.O_DIRECT)
    assert read(disk, file, 512, 512) == OLD[:512]
    for offset, byte_count in ((1, 512), (512, 100)):
        with pytest.raises(OSError, match="Invalid argument"):
            read(disk, file, byte_count, offset)
        with pytest.raises(OSError, match="Invalid argument"):
            disk.pwrite(file, memoryview(bytes(byte_count)), offset)


def a_life(seed: int) -> SimulatedDisk:
    disk = SimulatedDisk(seed)
    disk.write_file(FILE, OLD)
    for number in range(4):
        file = disk.open(HOME / f"file-{number}", CREATE)
        write(disk, file, NEW * 3, number * 100)
        disk.allocate(file, 13_000)
        disk.sync_directory(HOME)
        if number % 2:
            disk.sync(file)
        disk.crash()
    return disk


def test_equal_seeds_give_equal_lives_and_others_differ() -> None:
    assert a_life(7).trace_digest() == a_life(7).trace_digest()
    assert len({a_life(seed).trace_digest() for seed in range(20)}) == 20


def test_a_different_caller_leaves_a_different_trace() -> None:
    digests = set()
    for offset, data in ((0, b"a"), (1, b"a"), (0, b"b")):
        disk = SimulatedDisk(1)
        disk.write_file(FILE, OLD)
        write(disk, disk.open(FILE, os.O_RDWR), data, offset)
        digests.add(disk.trace_digest())
    assert len(digests) == 3


def test_zeros_cost_nothing_to_hold() -> None:
    disk = SimulatedDisk(1)
    disk.make_directory(HOME)
    for number in range(1000):
        disk.allocate(disk.open(HOME / f"region-{number}", CREATE), 64 << 20)  # 64 GB in all
    assert disk.used_bytes(HOME) == 1000 * (64 << 20)
    disk.crash()


CHANGE = st.one_of(
    st.tuples(st.just("write"), st.integers(0, 12) | st.integers(4000, 5000), st.integers(1, 1500)),
    st.tuples(st.just("truncate"), st.just(0), st.just(0)),
    st.tuples(st.just("allocate"), st.integers(1, 6000), st.just(0)),
    st.tuples(st.just("sync"), st.just(0), st.just(0)),
    st.tuples(st.just("failing sync"), st.just(0), st.just(0)),
    st.tuples(st.just("kill"), st.just(0), st.just(0)),
)


@given(st.integers(0, 1000), st.lists(CHANGE, max_size=12))
def test_readers_see_the_newest_and_a_power_cut_leaves_only_what_was_once_there(
    seed: int, changes: list[tuple[str, int, int]]
) -> None:
    """Against a bytearray, and against what each byte has been since the last sync that covered it."""
    disk, model = SimulatedDisk(seed), bytearray()
    disk.write_file(FILE, b"")
    once: list[set[int]] = [{0} for _ in range(8000)]
    file, dirty = disk.open(FILE, os.O_RDWR), True
    for number, (kind, place, length) in enumerate(changes, start=1):
        dirty = kind != "sync" if kind in ("sync", "failing sync", "write", "truncate", "allocate") else dirty
        if kind == "write":
            model.extend(bytes(max(0, place - len(model))))
            model[place : place + length] = bytes([number]) * length
            write(disk, file, bytes([number]) * length, place)
            for position in range(place, place + length):
                once[position].add(number)
        elif kind == "truncate":
            model.clear()
            file = disk.open(FILE, os.O_RDWR | os.O_TRUNC)
        elif kind == "allocate":
            model.extend(bytes(max(0, place - len(model))))
            disk.allocate(file, place)
        elif kind == "kill":
            disk.kill()
            file = disk.open(FILE, os.O_RDWR)
        elif kind == "failing sync":
            disk.fail("sync", errno.EIO)
            with pytest.raises(OSError):
                disk.sync(file)
        else:
            disk.sync(file)
        assert disk.read_file(FILE) == model
    failed = any(kind == "failing sync" for kind, _, _ in changes)
    disk.crash()
    left = disk.read_file(FILE)
    if not dirty:
        assert len(left) == len(model)
        if not failed:
            assert left == model
    assert all(byte in once[position] for position, byte in enumerate(left))
