"""Which names a power cut may lose, and which it must not."""

from __future__ import annotations

import os
from pathlib import Path

from tests.seams.test_disk_contract import CREATE, put, write
from tests.simulated import SimulatedDisk
from tests.simulated.lives import FILE, HOME, NEW, OLD, outcomes, over_seeds


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
