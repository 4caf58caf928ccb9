"""Shared memory. One mapping is one memfd: written by its owner, handed to another process by descriptor.

Seals (Linux 5.1+): an arena region is sealed FUTURE_WRITE|SHRINK|GROW|SEAL, so that a descriptor handed out
can be neither mapped writable, written, truncated nor punched, whatever the receiver tries; only the
owner's mapping, made before the seal, stays writable. Staging is sealed SHRINK|GROW|SEAL: the client may
write it, and cannot shrink it under the server's copy (which would end the server with SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Exhausted, Unavailable

Bytes = NDArray[np.uint8]

F_ADD_SEALS = 1033
F_GET_SEALS = 1034
F_SEAL_SEAL = 0x01
F_SEAL_SHRINK = 0x02
F_SEAL_GROW = 0x04
F_SEAL_FUTURE_WRITE = 0x10

READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
FIXED_SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL

MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
POISON = 0xDB


class Mapping(Protocol):
    """A run of shared bytes this process owns, and the descriptor that shares it."""

    @property
    def descriptor(self) -> int: ...

    @property
    def bytes(self) -> Bytes:
        """The whole mapping as uint8, writable by the owner."""

    def prefault(self, offset: int, byte_count: int) -> None:
        """Back the range with pages now. Blocks; runs on a byte mover. Raises Exhausted out of memory."""

    def forget(self, offset: int, byte_count: int) -> None:
        """The range was freed: a simulation poisons it, the real one does nothing."""

    def close(self) -> None: ...


class Memory(Protocol):
    """An allocator of mappings."""

    def read_only_to_others(self, name: str, byte_count: int) -> Mapping: ...

    def writable_by_others(self, name: str, byte_count: int) -> Mapping: ...


class _MemfdMapping:
    def __init__(self, name: str, byte_count: int, seals: int) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, byte_count)
            self._map = mmap.mmap(self.descriptor, byte_count, flags=mmap.MAP_SHARED)
            self._map.madvise(mmap.MADV_DONTFORK)
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, seals)
        except OSError as error:
            os.close(self.descriptor)
            raise Unavailable(
                f"cannot share {byte_count} bytes of memory ({error.strerror}); kvstore needs Linux 5.1 or newer",
                name=name,
            ) from error
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)

    def prefault(self, offset: int, byte_count: int) -> None:
        try:
            self._map.madvise(MADV_POPULATE_WRITE, offset, byte_count)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise Exhausted("no memory to pre-fault the arena; lower arena.capacity_bytes") from error
            # Before Linux 5.14: read one byte of each page. A write could meet an early allocation's bytes.
            self.bytes[offset : offset + byte_count : mmap.PAGESIZE].max()

    def forget(self, offset: int, byte_count: int) -> None:
        return None

    def close(self) -> None:
        if self.descriptor < 0:
            return
        os.close(self.descriptor)
        self.descriptor = -1
        self.bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            # Somebody still holds a view: the mapping ends with the last one.
            pass


class SystemMemory:
    """memfds, mapped and sealed."""

    def read_only_to_others(self, name: str, byte_count: int) -> Mapping:
        return _MemfdMapping(name, byte_count, READ_ONLY_SEALS)

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return _MemfdMapping(name, byte_count, FIXED_SIZE_SEALS)


class _BytearrayMapping:
    descriptor = -1

    def __init__(self, byte_count: int) -> None:
        self.bytes: Bytes = np.full(byte_count, POISON, np.uint8)

    def prefault(self, offset: int, byte_count: int) -> None:
        return None

    def forget(self, offset: int, byte_count: int) -> None:
        self.bytes[offset : offset + byte_count] = POISON

    def close(self) -> None:
        self.bytes[:] = POISON


class BytearrayMemory:
    """Process-private twin: what is freed is poisoned, so that a late reader sees it."""

    def read_only_to_others(self, name: str, byte_count: int) -> Mapping:
        return _BytearrayMapping(byte_count)

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return _BytearrayMapping(byte_count)


def map_read_only(descriptor: int, byte_count: int) -> mmap.mmap:
    """Map another process's region. Not inherited by forked children, which must connect on their own."""
    mapping = mmap.mmap(descriptor, byte_count, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def map_writable(descriptor: int, byte_count: int) -> mmap.mmap:
    """Map a staging memfd for writing. Not inherited by forked children."""
    mapping = mmap.mmap(descriptor, byte_count, flags=mmap.MAP_SHARED)
    mapping.madvise(mmap.MADV_DONTFORK)
    return mapping


def populate_read(mapping: mmap.mmap, offset: int, byte_count: int) -> None:
    """Fill this process's page tables for the range, so that the first copy pays no faults."""
    try:
        mapping.madvise(MADV_POPULATE_READ, offset, byte_count)
    except OSError:
        return  # before Linux 5.14: the copy itself faults, slower and just as right


def descriptor_count() -> int:
    """How many descriptors this process has open. Raises OSError where /proc is not mounted."""
    return len(os.listdir("/proc/self/fd")) - 1  # the listing's own
