"""The contents and names on a simulated disk, each as readers see them, as the device holds them, and the changes in
between. ``disk`` says what may become of those changes."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import NamedTuple

import xxhash

SECTOR_BYTES = 512
"""The unit that a device writes whole or not at all."""
_PAGE_BYTES = 4096
_ZERO_PAGE = bytes(_PAGE_BYTES)


class _Image:
    """File content. Pages that hold only zeros are not kept."""

    def __init__(self) -> None:
        self.size = 0
        self._pages: dict[int, bytes] = {}

    def copy(self) -> _Image:
        twin = _Image()
        twin.size, twin._pages = self.size, dict(self._pages)
        return twin

    def read(self, offset: int, target: memoryview) -> int:
        count = max(0, min(len(target), self.size - offset))
        done = 0
        while done < count:
            index, start = divmod(offset + done, _PAGE_BYTES)
            part_bytes = min(_PAGE_BYTES - start, count - done)
            target[done : done + part_bytes] = self._pages.get(index, _ZERO_PAGE)[start : start + part_bytes]
            done += part_bytes
        return count

    def write(self, offset: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            index, start = divmod(offset + done, _PAGE_BYTES)
            part = data[done : done + _PAGE_BYTES - start]
            page = self._pages.get(index, _ZERO_PAGE)
            self._keep(index, page[:start] + part + page[start + len(part) :])
            done += len(part)
        if data:
            self.size = max(self.size, offset + len(data))

    def resize(self, size: int) -> None:
        if size < self.size:
            last, start = divmod(size, _PAGE_BYTES)
            self._keep(last, self._pages.get(last, _ZERO_PAGE)[:start].ljust(_PAGE_BYTES, b"\0"))
            self._pages = {index: page for index, page in self._pages.items() if index <= last}
        self.size = size

    def whole(self) -> bytes:
        data = bytearray(self.size)
        self.read(0, memoryview(data))
        return bytes(data)

    def mark(self) -> bytes:
        """Return a checksum of the content; its cost depends only on the pages that are kept."""
        pages = b"".join(index.to_bytes(8) + page for index, page in sorted(self._pages.items()))
        return xxhash.xxh3_128_digest(self.size.to_bytes(8) + pages)

    def _keep(self, index: int, page: bytes) -> None:
        if page == _ZERO_PAGE:
            self._pages.pop(index, None)
        else:
            self._pages[index] = page


class _Write(NamedTuple):
    offset: int
    data: bytes


class SimulatedFile:
    """Content as readers see it, content as the device holds it, and the changes in between: an int is a change of
    size."""

    def __init__(self) -> None:
        self.newest = _Image()
        self.taken_bytes = 0
        self.locked_by = 0
        self._durable = _Image()
        self._pending: list[_Write | int] = []

    def write(self, offset: int, data: bytes) -> None:
        self.newest.write(offset, data)
        self._pending.append(_Write(offset, data))

    def resize(self, size: int) -> None:
        self.newest.resize(size)
        self.taken_bytes = min(self.taken_bytes, size)
        self._pending.append(size)

    def sync(self) -> None:
        for change in self._pending:
            if isinstance(change, int):
                self._durable.resize(change)
            else:
                self._durable.write(*change)
        self._pending = []
        if self._durable.size != self.newest.size:
            self._durable.resize(self.newest.size)  # a write that a failed sync lost had made the file longer

    def fail_to_sync(self, chance: random.Random) -> None:
        """Draw which pending writes reached the device. The pages count as clean from now on, so no later sync writes
        them."""
        self._land([change for change in self._pending if not isinstance(change, int)], chance)
        self._pending = [change for change in self._pending if isinstance(change, int)]

    def lose_power(self, chance: random.Random) -> None:
        resizes = chance.randint(0, sum(isinstance(change, int) for change in self._pending))
        run: list[_Write] = []
        for change in self._pending:
            if not isinstance(change, int):
                run.append(change)
                continue
            self._land(run, chance)
            run = []
            if resizes:
                self._durable.resize(change)
                resizes -= 1
        self._land(run, chance)
        self._pending = []
        self.newest = self._durable.copy()
        self.taken_bytes = self.newest.size

    def replace(self, data: bytes) -> None:
        self.newest.resize(0)
        self.newest.write(0, data)
        self.taken_bytes = len(data)
        self._durable, self._pending = self.newest.copy(), []

    def flip(self, offset: int, mask: int) -> None:
        assert offset < self.newest.size, "nothing there to flip"
        for image in (self.newest, self._durable):
            byte = bytearray(1)
            if image.read(offset, memoryview(byte)):
                image.write(offset, bytes([byte[0] ^ mask]))
        for place, change in enumerate(self._pending):
            if not isinstance(change, int) and change.offset <= offset < change.offset + len(change.data):
                data = bytearray(change.data)
                data[offset - change.offset] ^= mask
                self._pending[place] = _Write(change.offset, bytes(data))

    def _land(self, writes: list[_Write], chance: random.Random) -> None:
        """Write some of the writes to the device, in some order; the file may become longer than the bytes that reached
        it."""
        for offset, data in chance.sample(writes, len(writes)):
            fate = chance.choice(("kept", "dropped", "torn"))
            if fate == "kept":
                self._durable.write(offset, data)
                continue
            if fate == "torn":
                start = 0
                while start < len(data):
                    end = start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES
                    if chance.random() < 0.5:
                        self._durable.write(offset + start, data[start:end])
                    start = end
            if chance.random() < 0.5:
                self._durable.resize(max(self._durable.size, offset + len(data)))


DIRECTORY = SimulatedFile()
"""Stands for every directory in a table of names."""


class _Naming:
    """One change of names, atomic: a creation, a removal (None) or a rename."""

    def __init__(self, names: dict[Path, SimulatedFile | None]) -> None:
        self.names = names
        self.parents = {name.parent for name in names}
        self.needed = self.parents.union(names)

    def apply(self, table: dict[Path, SimulatedFile]) -> None:
        for name, file in self.names.items():
            if file is None:
                table.pop(name, None)
            else:
                table[name] = file


class Names:
    """Names as readers see them, as the device holds them, and the changes in between."""

    def __init__(self) -> None:
        self.newest: dict[Path, SimulatedFile] = {}
        self._durable: dict[Path, SimulatedFile] = {}
        self._pending: list[_Naming] = []

    def find(self, path: Path) -> SimulatedFile:
        file = self.newest.get(path)
        if file is None:
            raise os_error(errno.ENOENT, path)
        if file is DIRECTORY:
            raise os_error(errno.EISDIR, path)
        return file

    def expect_directory(self, path: Path) -> None:
        if path != path.parent and self.newest.get(path) is not DIRECTORY:
            raise os_error(errno.ENOTDIR if path in self.newest else errno.ENOENT, path)

    def change(self, names: dict[Path, SimulatedFile | None]) -> None:
        self._pending.append(_Naming(names))
        self._pending[-1].apply(self.newest)

    def make_directory(self, path: Path) -> None:
        for directory in (*reversed(path.parents), path):
            if directory != directory.parent and directory not in self.newest:
                self.change({directory: DIRECTORY})
            self.expect_directory(directory)

    def sync(self, path: Path) -> None:
        """Make the changes in a directory, or of a name, durable, with the earlier changes that they depend on."""
        needed, synced, pending = {path}, [], []
        for naming in reversed(self._pending):
            if path in naming.parents or not needed.isdisjoint(naming.names):
                needed |= naming.needed
                synced.append(naming)
            else:
                pending.append(naming)
        self._pending = pending[::-1]
        for naming in reversed(synced):
            naming.apply(self._durable)

    def lose_power(self, chance: random.Random) -> None:
        lost: set[Path] = set()
        for naming in self._pending:
            if naming.needed.isdisjoint(lost) and chance.random() < 0.5:
                naming.apply(self._durable)
            else:
                lost.update(naming.names)
        self._pending = []
        self.newest = dict(self._durable)


def os_error(number: int, path: Path) -> OSError:
    """Return the error that the kernel would raise for ``path``."""
    return OSError(number, os.strerror(number), str(path))
