"""What every Disk does, the machine's and the simulated one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.seams import Disk, SystemDisk
from tests.simulated import SimulatedDisk

CREATE = os.O_RDWR | os.O_CREAT


@pytest.fixture(params=["system", "simulated"])
def disk(request: pytest.FixtureRequest) -> Disk:
    return SystemDisk() if request.param == "system" else SimulatedDisk(1)


@pytest.fixture
def home(disk: Disk, tmp_path: Path) -> Path:
    """A directory that exists on either disk."""
    disk.make_directory(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def file(disk: Disk, home: Path) -> Iterator[int]:
    descriptor = disk.open(home / "file", CREATE)
    yield descriptor
    disk.close(descriptor)


def read(disk: Disk, descriptor: int, byte_count: int, offset: int = 0) -> bytes:
    buffer = bytearray(byte_count)
    return bytes(buffer[: disk.pread(descriptor, memoryview(buffer), offset)])


def write(disk: Disk, descriptor: int, data: bytes, offset: int = 0) -> None:
    assert disk.pwrite(descriptor, memoryview(data), offset) == len(data)


def put(disk: Disk, path: Path, data: bytes) -> None:
    descriptor = disk.open(path, CREATE | os.O_TRUNC)
    write(disk, descriptor, data)
    disk.close(descriptor)


def get(disk: Disk, path: Path) -> bytes:
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        return read(disk, descriptor, disk.size(descriptor))
    finally:
        disk.close(descriptor)


def test_what_was_written_is_read_back(disk: Disk, file: int) -> None:
    data = bytes(range(256)) * 50
    write(disk, file, data, 3000)
    write(disk, file, b"over", 5000)
    expected = bytes(3000) + data[:2000] + b"over" + data[2004:]
    assert disk.size(file) == len(expected)
    assert read(disk, file, len(expected)) == expected
    assert read(disk, file, 100, 4990) == expected[4990:5090]


def test_a_read_stops_at_the_end_of_the_file(disk: Disk, file: int) -> None:
    write(disk, file, b"short")
    assert read(disk, file, 100, 2) == b"ort"
    assert read(disk, file, 100, 5) == b""
    assert read(disk, file, 100, 10_000) == b""
    assert read(disk, file, 0) == b""


def test_a_sync_changes_nothing_that_readers_see(disk: Disk, home: Path, file: int) -> None:
    write(disk, file, b"content")
    disk.sync(file)
    disk.sync_directory(home)
    assert get(disk, home / "file") == b"content"


def test_allocate_grows_with_zeros_and_never_cuts(disk: Disk, file: int) -> None:
    write(disk, file, b"start")
    disk.allocate(file, 9000)
    assert disk.size(file) == 9000
    disk.allocate(file, 100)
    assert disk.size(file) == 9000
    assert read(disk, file, 9000) == b"start" + bytes(8995)


def test_a_rename_takes_the_target_s_place(disk: Disk, home: Path) -> None:
    put(disk, home / "old", b"old")
    put(disk, home / "new", b"new")
    reader = disk.open(home / "old", os.O_RDONLY)
    disk.rename(home / "new", home / "old")
    assert disk.names(home) == ["old"]
    assert get(disk, home / "old") == b"new"
    assert read(disk, reader, 10) == b"old"
    disk.close(reader)


def test_a_rename_to_itself_keeps_the_file(disk: Disk, home: Path) -> None:
    put(disk, home / "file", b"here")
    disk.rename(home / "file", home / "file")
    assert get(disk, home / "file") == b"here"


def test_names_are_sorted_and_only_of_that_directory(disk: Disk, home: Path) -> None:
    assert disk.names(home) == []
    disk.make_directory(home / "below" / "deeper")
    for name in ("c", "a", "b"):
        put(disk, home / name, b"")
    put(disk, home / "below" / "hidden", b"")
    assert disk.names(home) == ["a", "b", "below", "c"]
    assert disk.names(home / "below") == ["deeper", "hidden"]


def test_removing_what_is_absent_is_fine(disk: Disk, home: Path) -> None:
    put(disk, home / "file", b"")
    disk.remove(home / "file")
    disk.remove(home / "file")
    assert disk.names(home) == []
    with pytest.raises(FileNotFoundError):
        disk.open(home / "file", os.O_RDWR)


def test_a_removed_file_lives_while_it_is_open(disk: Disk, home: Path, file: int) -> None:
    write(disk, file, b"still here")
    disk.remove(home / "file")
    assert read(disk, file, 100) == b"still here"
    put(disk, home / "file", b"another")
    assert read(disk, file, 100) == b"still here"


def test_a_sync_of_a_removed_file_fails(disk: Disk, home: Path, file: int) -> None:
    write(disk, file, b"here")
    disk.sync(file)
    disk.rename(home / "file", home / "renamed")
    disk.sync(file)
    disk.remove(home / "renamed")
    with pytest.raises(FileNotFoundError):
        disk.sync(file)
    assert read(disk, file, 4) == b"here"


def test_open_obeys_its_flags(disk: Disk, home: Path, file: int) -> None:
    write(disk, file, b"content")
    with pytest.raises(FileExistsError):
        disk.open(home / "file", CREATE | os.O_EXCL)
    disk.close(disk.open(home / "file", CREATE))
    assert disk.size(file) == 7
    disk.close(disk.open(home / "file", CREATE | os.O_TRUNC))
    assert disk.size(file) == 0


def test_a_descriptor_allows_what_it_was_opened_for(disk: Disk, home: Path) -> None:
    put(disk, home / "file", b"content")
    reader, writer = disk.open(home / "file", os.O_RDONLY), disk.open(home / "file", os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.pwrite(reader, memoryview(b"x"), 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.pread(writer, memoryview(bytearray(1)), 0)
    disk.close(reader)
    disk.close(writer)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.size(reader)


def test_what_is_absent_is_not_found(disk: Disk, home: Path) -> None:
    absent = home / "absent"
    with pytest.raises(FileNotFoundError):
        disk.open(absent / "file", CREATE)
    with pytest.raises(FileNotFoundError):
        disk.rename(absent, home / "target")
    with pytest.raises(FileNotFoundError):
        disk.names(absent)
    with pytest.raises(FileNotFoundError):
        disk.sync_directory(absent)


def test_a_lock_has_one_holder_until_it_closes(disk: Disk, home: Path, file: int) -> None:
    first, second = disk.open(home / "file", os.O_RDWR), disk.open(home / "file", os.O_RDWR)
    assert disk.lock(first)
    assert disk.lock(first)
    assert not disk.lock(second)
    disk.close(first)
    assert disk.lock(second)
    disk.close(second)


def test_locks_of_different_files_are_independent(disk: Disk, home: Path, file: int) -> None:
    other = disk.open(home / "other", CREATE)
    assert disk.lock(file)
    assert disk.lock(other)
    disk.close(other)


def test_a_directory_is_made_with_its_parents_and_only_where_it_can_be(disk: Disk, home: Path) -> None:
    disk.make_directory(home / "a" / "b")
    disk.make_directory(home / "a" / "b")
    assert disk.names(home / "a") == ["b"]
    put(disk, home / "file", b"")
    for path in (home / "file", home / "file" / "below"):
        with pytest.raises(Unavailable, match=str(path)):
            disk.make_directory(path)


def test_the_file_system_is_of_some_kind(disk: Disk, home: Path) -> None:
    assert disk.file_system(home)


def test_a_new_directory_is_synced_where_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one of several; and what is there already costs nothing."""
    fsync, synced = os.fsync, []

    def recorded(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    for _ in range(2):
        SystemDisk().make_directory(tmp_path / "a" / "b" / "c")
        assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert (tmp_path / "a" / "b" / "c").stat().st_mode & 0o777 == 0o700
