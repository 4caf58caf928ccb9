"""Maps shared memory at a 2 MiB boundary, and backs it with huge pages where the kernel makes them.

Huge pages have three gains: a memfd is backed at 18 GB/s instead of 1.5, a process that maps it has 512 times fewer
page faults, and a device reads into it at its full rate, of which scattered small pages cost a third.
``MADV_COLLAPSE`` (Linux 6.1) makes them whatever ``shmem_enabled`` says; older kernels get small pages, and the same
bytes. Python's own mmap can neither choose the address nor let others run while the kernel works.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Exhausted, Unavailable

Bytes = NDArray[np.uint8]

HUGE_BYTES = 2 << 20
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def address_of(memory: Bytes) -> int:
    """Return the address of an array's first byte: at a sixth of the cost of ``memory.ctypes.data``, where it is in one
    piece and may be written."""
    if memory.size and memory.flags.writeable and memory.flags.c_contiguous:
        return ctypes.addressof(ctypes.c_char.from_buffer(memory.data))
    return memory.ctypes.data


class MappedPages:
    """Owns the addresses: they are unmapped when the last array over them is gone. ``before_unmapping``: called then,
    in the process that mapped them, while they are still there."""

    def __init__(self, address: int, byte_count: int, *, writable: bool) -> None:
        # Never marked read-only: torch warns about read-only arrays, and the kernel refuses a write anyway.
        self.__array_interface__ = {"data": (address, False), "shape": (byte_count,), "typestr": "|u1", "version": 3}
        self.address, self.byte_count, self.writable = address, byte_count, writable
        self.before_unmapping: list[Callable[[], object]] = []
        weakref.finalize(self, _unmap, os.getpid(), address, byte_count, self.before_unmapping).atexit = False

    def back(self) -> bool:
        """Back all of the mapping, whether it may be written or only read, with huge pages where the kernel makes them.
        Blocks. Returns False where the machine has no memory for it."""
        _make_huge(self.address, self.byte_count)
        return _advise(self.address, self.byte_count, _MADV_POPULATE_READ) in (0, errno.EINVAL)  # before Linux 5.14


def _advise(address: int, byte_count: int, advice: int) -> int:
    """Call madvise, and return 0 or the error's number. Other threads run meanwhile."""
    return ctypes.get_errno() if _libc.madvise(address, byte_count, advice) else 0


def _make_huge(address: int, byte_count: int) -> None:
    """Back the huge pages that lie whole in a range, where the kernel makes them. Mappings begin at a huge page's
    boundary."""
    first = -(-address // HUGE_BYTES) * HUGE_BYTES
    # Page by page: the kernel holds the process's memory map meanwhile, and a killed process ends only in between.
    for block in range(first, (address + byte_count) // HUGE_BYTES * HUGE_BYTES, HUGE_BYTES):
        _advise(block, mmap.PAGESIZE, _MADV_POPULATE_READ)  # the kernel collapses no block without a page
        _advise(block, HUGE_BYTES, _MADV_COLLAPSE)


def pages_of(memory: Bytes) -> MappedPages | None:
    """Return the mapping that an array is a view of; None for other memory."""
    owner: object = memory
    while owner is not None and not isinstance(owner, MappedPages):
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    return owner


def _unmap(owner_pid: int, address: int, byte_count: int, before: Sequence[Callable[[], object]]) -> None:
    # A forked child does not have these pages (MADV_DONTFORK): by now something else may lie at their addresses.
    if os.getpid() == owner_pid:
        for each in before:
            each()
        _libc.munmap(address, byte_count)


def _map(descriptor: int, byte_count: int, protection: int) -> int:
    """Map a descriptor at a huge page's boundary, and return the address. Raises OSError."""
    room = byte_count + HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    start: int = _libc.mmap(None, room, _PROT_NONE, flags, -1, 0)
    if start == _FAILED:
        raise _error()
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    if _libc.mmap(address, byte_count, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) == _FAILED:
        error = _error()
        _libc.munmap(start, room)
        raise error
    end = -(-(address + byte_count) // mmap.PAGESIZE) * mmap.PAGESIZE
    for low, high in ((start, address), (end, start + room)):
        if low < high:
            _libc.munmap(low, high - low)
    return address


@contextmanager
def closing_all(descriptors: Sequence[int]) -> Iterator[None]:
    """Close the descriptors at the end, also after an error. Mappings made of them stay."""
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


class SharedMap:
    """A descriptor's bytes in this process; forked children do not have them. The mapping lives as long as an array
    over it does. Raises Unavailable when the kernel refuses it."""

    def __init__(self, descriptor: int, byte_count: int, *, writable: bool) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            self._address = _map(descriptor, byte_count, protection)
        except OSError as error:
            raise Unavailable(
                f"cannot map {byte_count} bytes of shared memory ({error.strerror}): raise this process's address "
                "space (ulimit -v) or the machine's vm.max_map_count",
                byte_count=byte_count,
            ) from error
        self.byte_count = byte_count
        self.bytes: Bytes = np.asarray(MappedPages(self._address, byte_count, writable=writable))
        _advise(self._address, byte_count, mmap.MADV_DONTFORK)

    def back(self, offset: int, byte_count: int) -> None:
        """Back a range of a writable mapping with pages now, with huge pages where a whole one lies in the range. Its
        contents stay as they are. Blocks. Raises Exhausted out of memory."""
        _make_huge(self._address + offset, byte_count)
        problem = _advise(self._address + offset, byte_count, _MADV_POPULATE_WRITE)
        if problem == errno.EINVAL:  # before Linux 5.14: read one byte of each page
            self.bytes[offset : offset + byte_count : mmap.PAGESIZE].max()
        elif problem:  # EFAULT included: pages refused for other reasons than room would end the process at a touch
            raise Exhausted(
                f"no memory for {byte_count} bytes of pages ({os.strerror(problem)}): lower arena.capacity_bytes, or "
                "have fewer clients"
            )

    def close(self) -> None:
        """Drop the array of the bytes. Other views of it keep the mapping. Idempotent."""
        self.bytes = np.empty(0, np.uint8)
