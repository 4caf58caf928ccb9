"""A simulated disk stops, fails, fills and rots where and as often as it was told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from tests.seams.test_disk_contract import CREATE, get, put, read, write
from tests.simulated import DiskStopped, SimulatedDisk
from tests.simulated.lives import FILE, HOME, NEW, OLD, SEEDS, outcomes
from tests.simulated.test_disk_names import replace


def test_a_killed_process_loses_descriptors_and_locks_only() -> None:
    for seed in SEEDS:
        disk = SimulatedDisk(seed)
        disk.make_directory(HOME)
        put(disk, FILE, NEW)
        file = disk.open(FILE, os.O_RDWR)
        assert disk.lock(file)
        disk.kill()
        with pytest.raises(OSError, match="Bad file descriptor"):
            disk.size(file)
        assert disk.read_file(FILE) == NEW
        assert disk.lock(disk.open(FILE, os.O_RDWR))


def test_what_a_killed_process_wrote_is_still_unsynced() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW)
        disk.kill()

    assert {OLD, NEW} < outcomes(lived)


def test_descriptors_and_locks_end_with_the_power() -> None:
    disk = SimulatedDisk(1)
    disk.write_file(FILE, OLD)
    file = disk.open(FILE, os.O_RDWR)
    assert disk.lock(file)
    disk.crash()
    calls: list[Callable[[], object]] = [
        lambda: disk.pread(file, memoryview(bytearray(1)), 0),
        lambda: disk.pwrite(file, memoryview(b"x"), 0),
        lambda: disk.sync(file),
        lambda: disk.close(file),
        lambda: disk.lock(file),
    ]
    for call in calls:
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.EBADF
    again = disk.open(FILE, os.O_RDWR)
    assert again != file
    assert disk.lock(again)


def test_a_crash_at_every_step_leaves_old_or_new() -> None:
    whole = SimulatedDisk(0)
    whole.write_file(FILE, OLD)
    replace(whole, NEW)
    assert whole.steps == 5  # open, write, sync, rename, sync of the directory
    found = set()
    for step in range(whole.steps):
        for seed in SEEDS:
            disk = SimulatedDisk(seed)
            disk.write_file(FILE, OLD)
            disk.stop_after = step
            with pytest.raises(DiskStopped):
                replace(disk, NEW)
            assert disk.steps == step
            disk.crash()
            found.add((step, disk.read_file(FILE)))
            replace(disk, b"and on we go")
    assert {content for _, content in found} == {OLD, NEW}
    assert {step for step, content in found if content == NEW} == {3, 4}


def test_a_stopped_disk_answers_nothing_until_it_starts_again() -> None:
    disk = SimulatedDisk(1)
    disk.write_file(FILE, OLD)
    file = disk.open(FILE, os.O_RDWR)
    disk.stop_after = 1
    write(disk, file, NEW)
    assert read(disk, file, 4096) == NEW
    with pytest.raises(DiskStopped):
        disk.sync(file)
    for _ in range(3):
        with pytest.raises(DiskStopped):
            read(disk, file, 10)
        with pytest.raises(DiskStopped):
            disk.names(HOME)
        with pytest.raises(DiskStopped):
            disk.close(file)
        with pytest.raises(DiskStopped):
            disk.make_directory(Path("/more"))
    disk.kill()
    assert disk.stop_after is None
    assert get(disk, FILE) == NEW


def test_the_write_that_was_cut_short_happened_in_part_or_not() -> None:
    lengths = set()
    for seed in SEEDS:
        disk = SimulatedDisk(seed)
        disk.write_file(FILE, OLD)
        file = disk.open(FILE, os.O_RDWR)
        disk.stop_after = 0
        with pytest.raises(DiskStopped):
            disk.pwrite(file, memoryview(NEW), 0)
        disk.kill()
        content = disk.read_file(FILE)
        lengths.add(content.count(b"n"))
        assert content == NEW[: content.count(b"n")] + OLD[content.count(b"n") :]
    assert lengths == {512 * count for count in range(9)}


def test_a_rename_that_was_cut_short_happened_or_not() -> None:
    found = set()
    for seed in SEEDS:
        disk = SimulatedDisk(seed)
        disk.write_file(FILE, OLD)
        disk.stop_after = 0
        with pytest.raises(DiskStopped):
            disk.rename(FILE, HOME / "there")
        disk.kill()
        found.add(tuple(disk.names(HOME)))
    assert found == {("file",), ("there",)}


def test_a_call_that_would_have_failed_stops_all_the_same() -> None:
    for seed in SEEDS:
        disk = SimulatedDisk(seed, capacity_bytes=10)
        disk.make_directory(HOME)
        disk.stop_after = disk.steps
        with pytest.raises(DiskStopped):
            disk.rename(HOME / "absent", HOME / "target")


def test_faults_strike_where_and_as_often_as_they_were_told() -> None:
    disk = SimulatedDisk(1)
    disk.make_directory(HOME)
    disk.fail("pwrite", errno.ENOSPC, path_contains="region", after=1, times=2)
    plain, region = disk.open(HOME / "plain", CREATE), disk.open(HOME / "region-0", CREATE)
    struck = []
    for number in range(5):
        write(disk, plain, b"x")
        try:
            write(disk, region, b"y", number)
        except OSError as error:
            struck.append((number, error.errno))
    assert struck == [(1, errno.ENOSPC), (2, errno.ENOSPC)]
    assert disk.read_file(HOME / "region-0") == b"y\0\0yy"


def test_a_fault_may_last() -> None:
    disk = SimulatedDisk(1)
    disk.write_file(FILE, OLD)
    disk.fail("open", errno.EMFILE, times=None)
    for _ in range(5):
        with pytest.raises(OSError, match="Too many open files"):
            disk.open(FILE, os.O_RDONLY)


def test_a_fault_in_making_a_directory_is_unavailable() -> None:
    disk = SimulatedDisk(1)
    disk.fail("make_directory", errno.EROFS)
    with pytest.raises(Unavailable, match=r"/home.*Read-only"):
        disk.make_directory(HOME)


def test_a_fault_s_method_must_exist() -> None:
    with pytest.raises(AssertionError):
        SimulatedDisk(1).fail("fsync", errno.EIO)


def test_a_full_disk_refuses_until_room_is_free() -> None:
    disk = SimulatedDisk(1, capacity_bytes=10_000)
    disk.make_directory(HOME)
    file, other = disk.open(FILE, CREATE), disk.open(HOME / "other", CREATE)
    disk.allocate(file, 6000)
    write(disk, other, b"x" * 3000)
    assert disk.used_bytes(HOME) == 9000
    write(disk, file, b"y" * 6000)  # its room is taken already
    refused: list[Callable[[], object]] = [
        lambda: disk.pwrite(other, memoryview(bytes(1001)), 3000),
        lambda: disk.allocate(other, 4001),
    ]
    for call in refused:
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.ENOSPC
    assert disk.size(other) == 3000
    write(disk, other, b"x" * 1000, 3000)
    disk.remove(HOME / "other")
    with pytest.raises(OSError, match="No space"):
        disk.allocate(file, 6001)  # it is open still
    disk.close(other)
    disk.allocate(file, 10_000)


def test_rot_is_seen_by_readers_and_survives_the_power() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        write(disk, file, NEW)
        disk.flip(FILE, 1000)
        disk.flip(FILE, 1001, 0x80)
        assert read(disk, file, 4, 999) == bytes([NEW[0], NEW[0] ^ 1, NEW[0] ^ 0x80, NEW[0]])
        disk.sync(file)

    expected = bytearray(NEW)
    expected[1000] ^= 1
    expected[1001] ^= 0x80
    assert outcomes(lived) == {bytes(expected)}
