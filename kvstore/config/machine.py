"""The machine's resources: memory (its own, or our control group's limit if that is less) and room on a device."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.config.fields import wrong_setting
from kvstore.seams.cgroup import group_memory
from kvstore.units import format_bytes


def memory_limit_bytes() -> int:
    """Return the bytes of physical memory, or the control group's limit where it is smaller."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(each.limit_bytes for each in group_memory())])


def check_arena(arena_bytes: int) -> None:
    """Raises InvalidRequest when an arena is larger than the machine's memory: the kernel would end the service, or an
    engine beside it, as the arena fills."""
    limit = memory_limit_bytes()
    if arena_bytes > limit:
        raise wrong_setting(
            "arena.capacity_bytes", format_bytes(arena_bytes), f"this machine, or the service's control group, has "
            f"{format_bytes(limit)}: use {format_bytes(limit * 3 // 4)} or less",
        )  # fmt: skip


CAPACITY_FILE = "capacity"
"""File in a device directory with the last capacity of the tier, a number of bytes."""


def kept_capacity_bytes(directory: Path) -> int:
    """Return the last capacity of a device directory, but never less than the bytes of its files: a default must not
    shrink the tier. 0: there was no tier."""
    try:
        kept = int((directory / CAPACITY_FILE).read_text(encoding="ascii"))
    except (OSError, ValueError):
        kept = 0
    try:
        return max(kept, _files_bytes(directory))
    except OSError:
        return kept  # the tier itself reports the problem with its directory


def _files_bytes(directory: Path) -> int:
    return sum(each.stat().st_size for each in directory.glob("region-*.kvs"))


def device_room_bytes(directory: Path) -> int:
    """Return the bytes that the file system of ``directory`` has for us: its free room, and the bytes of our files
    there, of all tenants."""
    there = next((each for each in (directory, *directory.parents) if os.path.isdir(each)), None)
    if there is None:
        return 0
    try:
        status = os.statvfs(there)
        ours = sum(map(_files_bytes, (directory, *directory.glob("tenants/*"))))
    except OSError:
        return 0  # the tier itself reports the problem with its directory
    return status.f_bavail * status.f_frsize + ours
