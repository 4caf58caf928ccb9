"""Files. The state directory and the tiers on disk reach the disk through this seam, so that a simulated disk
(``tests.simulated``) can lose, tear and refuse writes.

Every method but ``close`` may raise OSError; the caller translates it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvstore.errors import Unavailable

LOCK_WAIT_S = 2.0
"""Longest wait for a lock: the byte movers of a killed server hold its locks until their last request is done."""
LOCK_POLL_S = 0.01


class Disk(Protocol):
    """Positional I/O on file descriptors, and the calls that make it durable."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int: ...

    def close(self, descriptor: int) -> None: ...

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int: ...

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int: ...

    def sync(self, descriptor: int) -> None:
        """Make what was written durable. Raises OSError also where the file was removed meanwhile: bytes of a file that
        has no name are gone with the process."""

    def sync_directory(self, path: Path) -> None: ...

    def allocate(self, descriptor: int, byte_count: int) -> None:
        """Make the file ``byte_count`` bytes long and reserve its room, so that a later write cannot run out of it."""

    def size(self, descriptor: int) -> int:
        """The file's length in bytes."""

    def rename(self, source: Path, target: Path) -> None:
        """Replace a file by another, atomically for every reader; durable after ``sync_directory``."""

    def names(self, directory: Path) -> list[str]:
        """The names in a directory, sorted."""

    def file_system(self, directory: Path) -> str:
        """The kind of file system, as the kernel calls it ("ext4"); empty when it is unknown."""

    def lock(self, descriptor: int, wait_s: float = 0.0) -> bool:
        """Take the file's exclusive lock. False when another process holds it for ``wait_s``. Blocks."""

    def make_directory(self, path: Path) -> None:
        """Create ``path`` with its parents; the leaf is 0700. They are durable when this returns. Raises Unavailable
        naming the path."""

    def remove(self, path: Path) -> None:
        """Remove a file; absent is fine."""


class SystemDisk:
    """The operating system's files."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.preadv(descriptor, [buffer], offset)

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        return os.pwritev(descriptor, [buffer], offset)

    def sync(self, descriptor: int) -> None:
        os.fdatasync(descriptor)
        if not os.fstat(descriptor).st_nlink:
            raise OSError(errno.ENOENT, "the file was removed while it was in use")

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def allocate(self, descriptor: int, byte_count: int) -> None:
        os.posix_fallocate(descriptor, 0, byte_count)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def names(self, directory: Path) -> list[str]:
        return sorted(os.listdir(directory))

    def file_system(self, directory: Path) -> str:
        where = str(directory.resolve()) + "/"
        best = ("", "")
        try:
            for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
                _, point, kind, *_ = line.split()
                point = point.rstrip("/") + "/"
                if where.startswith(point) and len(point) >= len(best[0]):
                    best = (point, kind)
        except (OSError, ValueError):
            return ""
        return best[1]

    def lock(self, descriptor: int, wait_s: float = 0.0) -> bool:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(LOCK_POLL_S)
            else:
                return True

    def make_directory(self, path: Path) -> None:
        try:
            missing = [each for each in path.parents if not each.is_dir()]
            for parent in reversed(missing):
                self._make(parent, 0o777)
            self._make(path, 0o700)
        except OSError as error:
            raise Unavailable(f"cannot create directory {path}: {error.strerror}", path=str(path)) from error

    def _make(self, path: Path, mode: int) -> None:
        """Make a directory whose name survives a power cut. When we may not open its parent, only the file system's own
        journal protects the name."""
        is_new = not path.exists()
        path.mkdir(mode=mode, exist_ok=True)
        if is_new:
            with suppress(PermissionError):
                self.sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def read_whole(disk: Disk, path: Path, most_bytes: int) -> bytes:
    """Read a whole file, or its first ``most_bytes``. Raises OSError."""
    descriptor = disk.open(path, os.O_RDONLY)
    try:
        data = bytearray(min(disk.size(descriptor), most_bytes))
        done = 0
        while done < len(data):
            count = disk.pread(descriptor, memoryview(data)[done:], done)
            if count <= 0:
                break
            done += count
        return bytes(data[:done])
    finally:
        disk.close(descriptor)


def replace_whole(disk: Disk, path: Path, data: bytes, reach: Callable[[], None] = lambda: None) -> None:
    """Replace a file's contents atomically and durably. ``reach``: called before the new file gets its name. Raises
    OSError."""
    fresh = path.with_name(f"{path.name}.new")
    descriptor = disk.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        done = 0
        while done < len(data):
            count = disk.pwrite(descriptor, memoryview(data)[done : done + (8 << 20)], done)
            if count <= 0:
                raise OSError(errno.EIO, "the device took no byte of a write")
            done += count
        disk.sync(descriptor)
    finally:
        disk.close(descriptor)
    reach()
    disk.rename(fresh, path)
    disk.sync_directory(path.parent)
