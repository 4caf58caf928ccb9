"""Shared memory. One mapping is one memfd: written by its owner, handed to another process by descriptor.

Seals (Linux 5.1+): an arena region is sealed FUTURE_WRITE|SHRINK|GROW|SEAL, so that a descriptor handed out
can be neither mapped writable, written, truncated nor punched, whatever the receiver tries; only the
owner's mapping, made before the seal, stays writable. Staging is sealed SHRINK|GROW|SEAL: the client may
write it, and cannot shrink it under the server's copy (which would end the server with SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from kvstore.errors import Exhausted, KVStoreError, Unavailable
from kvstore.seams.mapping import Bytes as Bytes
from kvstore.seams.mapping import SharedMap, address_of
from kvstore.seams.scheduler import MORE_DESCRIPTORS, OUT_OF_DESCRIPTORS, Lender, OwnThreads

F_ADD_SEALS = 1033
F_SEAL_SEAL = 0x01
F_SEAL_SHRINK = 0x02
F_SEAL_GROW = 0x04
F_SEAL_FUTURE_WRITE = 0x10

READ_ONLY_SEALS = F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
FIXED_SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL


class Mapping(Protocol):
    """A run of shared bytes that this process owns, and the descriptor that shares it."""

    @property
    def descriptor(self) -> int: ...

    @property
    def bytes(self) -> Bytes:
        """The whole mapping as uint8, writable by the owner."""

    def prefault(self, offset: int, byte_count: int) -> None:
        """Back the range with pages now. Blocks; runs on a byte mover. Raises Exhausted out of memory."""

    def forget(self, offset: int, byte_count: int) -> None:
        """Tell that the range was freed. A simulation poisons it; the real mapping does nothing."""

    def close(self) -> None: ...


class Memory(Protocol):
    """An allocator of mappings."""

    def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Mapping:
        """Allocate memory that other processes can only read. ``is_moved``: byte movers write it, too."""

    def writable_by_others(self, name: str, byte_count: int) -> Mapping: ...


class _MemfdMapping:
    def __init__(self, name: str, byte_count: int, seals: int, lender: Lender) -> None:
        self._lender = lender
        try:
            self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _cannot_share(byte_count, error) from error
        try:
            os.ftruncate(self.descriptor, byte_count)
            self._map = SharedMap(self.descriptor, byte_count, writable=True)
            self._lent = lender.lend_memory(
                self.descriptor, self._map.bytes, writable=bool(seals & F_SEAL_FUTURE_WRITE)
            )
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, seals)
        except KVStoreError:
            os.close(self.descriptor)
            raise
        except OSError as error:
            os.close(self.descriptor)
            raise _cannot_share(byte_count, error) from error
        self.bytes = self._map.bytes

    def prefault(self, offset: int, byte_count: int) -> None:
        self._map.back(offset, byte_count)

    def forget(self, offset: int, byte_count: int) -> None:
        return None

    def close(self) -> None:
        if self.descriptor < 0:
            return
        self._lender.take_back_memory(self._lent)
        os.close(self.descriptor)
        self.descriptor = -1
        self.bytes = np.empty(0, np.uint8)
        self._map.close()


def _cannot_share(byte_count: int, error: OSError) -> KVStoreError:
    if error.errno in OUT_OF_DESCRIPTORS:
        return Exhausted(f"cannot share {byte_count} bytes of memory ({error.strerror}): {MORE_DESCRIPTORS}")
    is_limited = error.errno == errno.EFBIG
    remedy = "raise the limit on file sizes (ulimit -f)" if is_limited else "kvstore needs Linux 5.3 or newer"
    return Unavailable(f"cannot share {byte_count} bytes of memory ({error.strerror}): {remedy}")


class SystemMemory:
    """memfds, mapped and sealed. Byte movers may write memory that is read-only to others, and may only read memory
    that others write."""

    def __init__(self, lender: Lender | None = None) -> None:
        self._lender = lender or OwnThreads()

    def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Mapping:
        return _MemfdMapping(name, byte_count, READ_ONLY_SEALS, self._lender if is_moved else OwnThreads())

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return _MemfdMapping(name, byte_count, FIXED_SIZE_SEALS, self._lender)


def descriptor_count() -> int:
    """Return the number of open descriptors of this process. Raises OSError when /proc is not mounted."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the listing's own descriptor
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # no descriptor is left for the listing: all are open


def joined(arrays: Sequence[Bytes]) -> list[Bytes]:
    """Return the same memory in as few arrays as possible: arrays that touch each other become one. Cost: about 1 us
    each; loads call it for every few megabytes, on the service's loop."""
    runs: list[tuple[Bytes, int, int]] = []
    for each in arrays:
        start = address_of(each)
        if runs:
            first, begun, size = runs[-1]
            if first.base is each.base and begun + size == start:
                runs[-1] = (first, begun, size + each.size)
                continue
        runs.append((each, start, each.size))
    return [first if size == first.size else _longer(first, start, size) for first, start, size in runs]


def _longer(first: Bytes, start: int, size: int) -> Bytes:
    """Return the ``size`` bytes from the beginning of ``first`` on, which lies at ``start``."""
    base = first.base
    if isinstance(base, np.ndarray) and base.dtype == np.uint8 and base.ndim == 1 and base.flags.c_contiguous:
        offset = start - address_of(base)
        whole = base[offset : offset + size]
        if whole.flags.writeable != first.flags.writeable:
            whole.flags.writeable = False
        return whole
    return np.lib.stride_tricks.as_strided(first, (size,), (1,))


def cut(arrays: Sequence[Bytes], sizes: Sequence[int]) -> Iterator[list[Bytes]]:
    """Yield the same memory, one part after the other, in parts of these sizes."""
    waiting, at = list(arrays), 0
    for size in sizes:
        part: list[Bytes] = []
        while size:
            piece = waiting[0][at : at + size]
            part.append(piece)
            size -= piece.size
            at += piece.size
            if at == waiting[0].size:
                waiting, at = waiting[1:], 0
        yield part
