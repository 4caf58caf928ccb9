"""A disk in memory that keeps no more promises than a real one: the twin of ``SystemDisk``.

What a power cut (``crash``) may leave is drawn from the seed:

- content and size of a file: what the last ``sync`` saw. Each write since then is kept, dropped or torn at 512-byte
  sectors, in any order; of the truncations and allocations since then, the first few have happened
- names: what the last ``sync_directory`` saw. Each creation, removal or rename since then has happened whole or not at
  all, and only if those before it on the same names have. A synced file whose name is not synced may be gone
- a ``sync`` that failed writes nothing later: the pages count as clean, as on Linux; their bytes reached the device or
  did not, and no later ``sync`` brings them there

A killed process (``kill``) loses descriptors and locks only. Directories are names like others; ``sync_directory`` of a
new directory keeps the directory too, as journalling file systems do.

Differences from a real disk: every byte below the furthest one written or allocated takes room, holes too; a write is
never short; modes are ignored. Calls from several threads are safe, but then the seed does not fix their order.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvstore.errors import Unavailable
from tests.simulated.files import DIRECTORY, SECTOR_BYTES, Names, SimulatedFile, os_error

FIRST_DESCRIPTOR = 1 << 20
"""Above all descriptors of the process itself, so that a stray ``os.close`` closes nothing."""
METHODS = (
    *("open", "close", "pread", "pwrite", "sync", "sync_directory", "allocate", "size"),
    *("rename", "names", "lock", "make_directory", "remove"),
)


class DiskStopped(BaseException):
    """The process ended in the middle of this call. Not an Exception: a dead process handles no errors."""


@dataclass(frozen=True)
class _Opened:
    path: Path
    file: SimulatedFile
    flags: int

    def check(self, other_way: int, offset: int, byte_count: int) -> None:
        """Raise OSError for a call that the flags forbid: the other way of access, or O_DIRECT off the sectors."""
        if self.flags & os.O_ACCMODE == other_way:
            raise os_error(errno.EBADF, self.path)
        if self.flags & os.O_DIRECT and (offset | byte_count) % SECTOR_BYTES:
            raise os_error(errno.EINVAL, self.path)


@dataclass
class _Failure:
    method: str
    error: int
    path_contains: str
    after: int
    times: int | None

    def strikes(self, method: str, path: Path) -> bool:
        if method != self.method or self.path_contains not in str(path) or self.times == 0:
            return False
        self.after -= 1
        if self.after >= 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class SimulatedDisk:
    """Implements ``Disk``.

    ``steps`` counts the calls that change or sync something. Once it has come to ``stop_after``, the next such call is
    cut short: it takes effect, in part, or not; it and every call after it raise DiskStopped until ``crash`` or
    ``kill``. So a test can crash at every step: it sets ``stop_after`` to each number from 0 to the steps of a whole
    run.
    """

    def __init__(self, seed: int, *, capacity_bytes: int | None = None) -> None:
        self.steps = 0
        self.stop_after: int | None = None
        self.capacity_bytes = capacity_bytes
        self._chance = random.Random(seed)
        self._names = Names()
        self._opened: dict[int, _Opened] = {}
        self._last_descriptor = FIRST_DESCRIPTOR
        self._stopped = False
        self._failures: list[_Failure] = []
        self._trace = xxhash.xxh3_128()
        self._mutex = threading.RLock()

    # The calls of ``Disk``

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        with self._call("open", path, is_step=bool(flags & (os.O_CREAT | os.O_TRUNC))):
            if flags & os.O_CREAT and path not in self._names.newest:
                self._names.expect_directory(path.parent)
                self._names.change({path: SimulatedFile()})
            elif flags & os.O_CREAT and flags & os.O_EXCL:
                raise os_error(errno.EEXIST, path)
            file = self._names.find(path)
            if flags & os.O_TRUNC and file.newest.size:
                file.resize(0)
            self._last_descriptor += 1
            self._opened[self._last_descriptor] = _Opened(path, file, flags)
            return self._last_descriptor

    def close(self, descriptor: int) -> None:
        opened = self._find(descriptor)
        with self._call("close", opened.path, is_step=False):
            del self._opened[descriptor]
            if opened.file.locked_by == descriptor:
                opened.file.locked_by = 0

    def pread(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        opened = self._find(descriptor)
        with self._call("pread", opened.path, offset, byte_count=buffer.nbytes, is_step=False):
            opened.check(os.O_WRONLY, offset, buffer.nbytes)
            return opened.file.newest.read(offset, buffer.cast("B"))

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        opened, data = self._find(descriptor), buffer.tobytes()
        with self._call("pwrite", opened.path, offset, data, byte_count=len(data)):
            opened.check(os.O_RDONLY, offset, len(data))
            if self._stopped:  # cut short: only the first sectors are written
                data = data[: SECTOR_BYTES * self._chance.randint(0, -(-len(data) // SECTOR_BYTES))]
            if data:
                self._take(opened, offset + len(data))
                opened.file.write(offset, data)
        return len(data)

    def sync(self, descriptor: int) -> None:
        opened = self._find(descriptor)
        try:
            with self._call("sync", opened.path):
                opened.file.sync()
                if not any(opened.file is file for file in self._names.newest.values()):
                    raise os_error(errno.ENOENT, opened.path)
        except OSError:
            opened.file.fail_to_sync(self._chance)
            raise

    def sync_directory(self, path: Path) -> None:
        with self._call("sync_directory", path):
            self._names.expect_directory(path)
            self._names.sync(path)

    def allocate(self, descriptor: int, byte_count: int) -> None:
        opened = self._find(descriptor)
        with self._call("allocate", opened.path, byte_count=byte_count):
            opened.check(os.O_RDONLY, 0, 0)
            self._take(opened, byte_count)
            if byte_count > opened.file.newest.size:
                opened.file.resize(byte_count)

    def size(self, descriptor: int) -> int:
        opened = self._find(descriptor)
        with self._call("size", opened.path, is_step=False):
            return opened.file.newest.size

    def rename(self, source: Path, target: Path) -> None:
        with self._call("rename", source, data=bytes(target)):
            file = self._names.find(source)
            self._names.expect_directory(target.parent)
            if self._names.newest.get(target) is DIRECTORY:
                raise os_error(errno.EISDIR, target)
            if source != target:
                self._names.change({source: None, target: file})

    def names(self, directory: Path) -> list[str]:
        with self._call("names", directory, is_step=False):
            self._names.expect_directory(directory)
            return sorted(path.name for path in self._names.newest if path.parent == directory)

    def file_system(self, directory: Path) -> str:
        return "simulated"

    def lock(self, descriptor: int, wait_s: float = 0.0) -> bool:
        opened = self._find(descriptor)
        with self._call("lock", opened.path, is_step=False):
            opened.file.locked_by = opened.file.locked_by or descriptor
            return opened.file.locked_by == descriptor

    def make_directory(self, path: Path) -> None:
        try:
            with self._call("make_directory", path):
                self._names.make_directory(path)
        except OSError as error:
            raise Unavailable(f"cannot create directory {path}: {error.strerror}", path=str(path)) from error

    def remove(self, path: Path) -> None:
        with self._call("remove", path):
            if path in self._names.newest:
                self._names.find(path)
                self._names.change({path: None})

    # Calls for tests only: they are no steps, are not traced, and are never stopped

    def crash(self) -> None:
        """Cut the power. Descriptors are dead and locks gone; the module's docstring says what the files then hold."""
        with self._mutex:
            self._names.lose_power(self._chance)
            for path, file in sorted(self._names.newest.items()):
                if file is not DIRECTORY:
                    file.lose_power(self._chance)
                self._trace.update(bytes(path) + file.newest.mark())
            self.kill()

    def kill(self) -> None:
        """Kill the process: descriptors and locks go, and readers still find all that was written."""
        with self._mutex:
            for opened in self._opened.values():
                opened.file.locked_by = 0
            self._opened = {}
            self._stopped, self.stop_after = False, None

    def fail(self, method: str, error: int, *, path_contains: str = "", after: int = 0, times: int | None = 1) -> None:
        """Make calls of ``method`` on such a path raise OSError(error): the first ``after`` calls succeed, the next
        ``times`` fail (None: all from then on). A call that fails does nothing, except ``sync``: see the module's
        docstring."""
        assert method in METHODS, method
        self._failures.append(_Failure(method, error, path_contains, after, times))

    def mend(self) -> None:
        """Cancel the failures that ``fail`` asked for and that have not happened yet."""
        self._failures.clear()

    def flip(self, path: Path, offset: int, mask: int = 1) -> None:
        """Simulate rot: flip the bits of ``mask`` in one byte, on the device and for readers alike."""
        self._names.find(path).flip(offset, mask)

    def read_file(self, path: Path) -> bytes:
        """Return the whole file as readers see it."""
        return self._names.find(path).newest.whole()

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a file with its name and directories, durable at once."""
        self._names.make_directory(path.parent)
        if path not in self._names.newest:
            self._names.change({path: SimulatedFile()})
        self._names.sync(path)
        self._names.find(path).replace(data)

    def used_bytes(self, directory: Path) -> int:
        """Return the room that the files in and below a directory take."""
        return sum(file.taken_bytes for path, file in self._names.newest.items() if directory in path.parents)

    def trace_digest(self) -> str:
        """Return a digest of every call so far, in order, and of what each power cut left: equal for equal seeds and
        callers."""
        return str(self._trace.hexdigest())

    @contextmanager
    def _call(
        self, method: str, path: Path, offset: int = 0, data: bytes = b"", *, byte_count: int = 0, is_step: bool = True
    ) -> Iterator[None]:
        """Surround each call: trace it, count it, raise a planned failure, or cut it short as the last call of the
        process."""
        with self._mutex:
            self._check_running()
            self._trace.update(f"{self.steps} {method} {path} {offset} {byte_count} ".encode())
            self._trace.update(xxhash.xxh3_128_digest(data))
            if is_step and self.stop_after is not None and self.steps >= self.stop_after:
                self._stopped = True
                try:
                    if self._chance.random() < 0.5:
                        yield
                finally:
                    raise DiskStopped
            self.steps += is_step
            for failure in self._failures:
                if failure.strikes(method, path):
                    raise os_error(failure.error, path)
            yield

    def _check_running(self) -> None:
        if self._stopped:
            raise DiskStopped

    def _find(self, descriptor: int) -> _Opened:
        self._check_running()
        if descriptor not in self._opened:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return self._opened[descriptor]

    def _taken_bytes(self) -> int:
        files = {id(file): file for file in self._names.newest.values()}
        files.update((id(opened.file), opened.file) for opened in self._opened.values())
        return sum(file.taken_bytes for file in files.values())

    def _take(self, opened: _Opened, end: int) -> None:
        more_bytes = end - opened.file.taken_bytes
        if more_bytes <= 0:
            return
        if self.capacity_bytes is not None and self._taken_bytes() + more_bytes > self.capacity_bytes:
            raise os_error(errno.ENOSPC, opened.path)
        opened.file.taken_bytes = end
