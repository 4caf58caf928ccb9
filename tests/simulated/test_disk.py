"""What a simulated disk may lose, and what it must not: over many seeds, each outcome that is allowed occurs, and no
other."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Unavailable
from kvstore.simulated import DiskStopped, SimulatedDisk
from tests.seams.test_disk_contract import CREATE, get, put, read, write

HOME = Path("/home")
FILE = HOME / "file"
SEEDS = range(60)
OLD, NEW = b"o" * 4096, b"n" * 4096


def over_seeds(lived: Callable[[SimulatedDisk, int], None], seeds: range = SEEDS) -> list[SimulatedDisk]:
    """A disk per seed with OLD in FILE for good; then ``lived`` with the file open; then a power cut."""
    disks = []
    for seed in seeds:
        disk = SimulatedDisk(seed)
        disk.write_file(FILE, OLD)
        lived(disk, disk.open(FILE, os.O_RDWR))
        disk.crash()
        disks.append(disk)
    return disks


def outcomes(lived: Callable[[SimulatedDisk, int], None]) -> set[bytes]:
    return {disk.read_file(FILE) for disk in over_seeds(lived)}


def sectors(data: bytes) -> list[bytes]:
    return [data[start : start + 512] for start in range(0, len(data), 512)]


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


def test_a_new_name_may_be_lost_with_its_synced_file() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        other = disk.open(HOME / "other", CREATE)
        write(disk, other, NEW)
        disk.sync(other)

    disks = over_seeds(lived)
    assert {tuple(disk.names(HOME)) for disk in disks} == {("file",), ("file", "other")}
    assert {disk.read_file(HOME / "other") for disk in disks if disk.names(HOME)[-1] == "other"} == {NEW}


def test_a_removal_may_be_lost() -> None:
    disks = over_seeds(lambda disk, file: disk.remove(FILE))
    assert {tuple(disk.names(HOME)) for disk in disks} == {(), ("file",)}
    assert {disk.read_file(FILE) for disk in disks if disk.names(HOME)} == {OLD}


def test_synced_names_survive() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        put(disk, HOME / "kept", b"")
        put(disk, HOME / "gone", b"")
        put(disk, HOME / "moved", b"")
        disk.remove(HOME / "gone")
        disk.rename(HOME / "moved", HOME / "there")
        disk.sync_directory(HOME)

    assert {tuple(disk.names(HOME)) for disk in over_seeds(lived)} == {("file", "kept", "there")}


def test_changes_of_different_names_are_lost_independently() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        put(disk, HOME / "a", b"")
        put(disk, HOME / "b", b"")

    found = {tuple(disk.names(HOME)) for disk in over_seeds(lived)}
    assert found == {("file",), ("a", "file"), ("b", "file"), ("a", "b", "file")}


def test_a_file_that_moved_twice_has_one_name() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        disk.rename(FILE, HOME / "once")
        disk.rename(HOME / "once", HOME / "twice")

    disks = over_seeds(lived)
    assert {tuple(disk.names(HOME)) for disk in disks} == {("file",), ("once",), ("twice",)}
    assert {disk.read_file(HOME / disk.names(HOME)[0]) for disk in disks} == {OLD}


def replace(disk: SimulatedDisk, data: bytes) -> None:
    """The old content or the new, whenever the power goes: as a careful writer does it."""
    fresh = disk.open(HOME / "file.new", CREATE | os.O_TRUNC)
    write(disk, fresh, data)
    disk.sync(fresh)
    disk.close(fresh)
    disk.rename(HOME / "file.new", FILE)
    disk.sync_directory(HOME)


def test_a_rename_happens_whole_or_not_at_all() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        put(disk, HOME / "file.new", NEW)
        disk.sync(disk.open(HOME / "file.new", os.O_RDWR))
        disk.rename(HOME / "file.new", FILE)

    states = {(tuple(disk.names(HOME)), disk.read_file(FILE)) for disk in over_seeds(lived)}
    assert states == {(("file",), OLD), (("file", "file.new"), OLD), (("file",), NEW)}


def test_a_rename_without_a_sync_before_it_may_leave_an_empty_file() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        put(disk, HOME / "file.new", NEW)
        disk.rename(HOME / "file.new", FILE)
        disk.sync_directory(HOME)

    assert {b"", NEW} <= outcomes(lived)


def test_a_rename_between_directories_is_one_change() -> None:
    def lived(disk: SimulatedDisk, file: int) -> None:
        disk.make_directory(Path("/away"))
        disk.sync_directory(Path("/away"))
        disk.rename(FILE, Path("/away/file"))

    for disk in over_seeds(lived):
        assert len(disk.names(HOME)) + len(disk.names(Path("/away"))) == 1


def test_a_synced_name_is_not_undone_by_an_older_change() -> None:
    """The rename away was never synced where it went; the new file of that name was synced where it is."""

    def lived(disk: SimulatedDisk, file: int) -> None:
        disk.make_directory(HOME / "below")
        put(disk, HOME / "below" / "file", b"in the way")
        disk.rename(FILE, HOME / "below" / "file")
        fresh = disk.open(FILE, CREATE)
        write(disk, fresh, NEW)
        disk.sync(fresh)
        disk.sync_directory(HOME)

    for disk in over_seeds(lived):
        assert disk.read_file(FILE) == NEW
        assert disk.read_file(HOME / "below" / "file") == OLD


def test_a_new_directory_is_lost_with_all_that_is_in_it_or_kept_by_its_own_sync() -> None:
    below = HOME / "below"

    def make(disk: SimulatedDisk, file: int) -> None:
        disk.make_directory(below)
        put(disk, below / "a", b"")

    def keep(disk: SimulatedDisk, file: int) -> None:
        make(disk, file)
        disk.sync_directory(below)

    found = set()
    for disk in over_seeds(make):
        left = disk.names(HOME)
        disk.make_directory(below)
        found.add((*left, *disk.names(below)))
    assert found == {("file",), ("below", "file"), ("below", "file", "a")}
    assert {tuple(disk.names(below)) for disk in over_seeds(keep)} == {("a",)}


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
