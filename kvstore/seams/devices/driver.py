"""The CUDA driver's calls that regions need, by ctypes. The driver is opened at the first use, never at import."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kvstore.errors import Exhausted, KVStoreError, Unavailable

LIBRARY = "libcuda.so.1"
OUT_OF_MEMORY = 2
PINNED, ON_DEVICE, BY_DESCRIPTOR, READ_WRITE = 1, 1, 1, 3
"""Values of CUmemAllocationType, CUmemLocationType, CUmemAllocationHandleType and CUmemAccess_flags."""
SHARES_BY_DESCRIPTOR = 103
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"""
NON_BLOCKING = 1
_size, _pointer, _int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_wide, _address = ctypes.c_ulonglong, ctypes.c_ulonglong


class MemoryLocation(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", _int), ("id", _int))


class MemoryFlags(ctypes.Structure):
    """The flags in CUmemAllocationProp."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemoryProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", _int),
        ("handles", _int),
        ("location", MemoryLocation),
        ("windows", _pointer),
        ("flags", MemoryFlags),
    )


class MemoryAccess(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", MemoryLocation), ("flags", _int))


class Uuid(ctypes.Structure):
    """CUuuid."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


_CALLS: dict[str, list[Any]] = {
    "cuInit": [ctypes.c_uint],
    "cuDeviceGet": [_pointer, _int],
    "cuDeviceGetUuid_v2": [_pointer, _int],
    "cuDeviceGetAttribute": [_pointer, _int, _int],
    "cuDevicePrimaryCtxRetain": [_pointer, _int],
    "cuCtxSetCurrent": [_pointer],
    "cuCtxGetCurrent": [_pointer],
    "cuMemGetAllocationGranularity": [_pointer, _pointer, _int],
    "cuMemCreate": [_pointer, _size, _pointer, _wide],
    "cuMemRelease": [_wide],
    "cuMemExportToShareableHandle": [_pointer, _wide, _int, _wide],
    "cuMemImportFromShareableHandle": [_pointer, _pointer, _int],
    "cuMemAddressReserve": [_pointer, _size, _size, _address, _wide],
    "cuMemAddressFree": [_address, _size],
    "cuMemMap": [_address, _size, _size, _wide, _wide],
    "cuMemUnmap": [_address, _size],
    "cuMemSetAccess": [_address, _size, _pointer, _size],
    "cuMemcpyHtoDAsync_v2": [_address, _pointer, _size, _pointer],
    "cuMemcpyDtoHAsync_v2": [_pointer, _address, _size, _pointer],
    "cuStreamCreate": [_pointer, ctypes.c_uint],
    "cuStreamSynchronize": [_pointer],
    "cuGetErrorString": [_int, _pointer],
}


class Driver:
    """The opened driver. Raises Unavailable where there is none, or no device."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, arguments in _CALLS.items():
                getattr(self._library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            raise Unavailable(f"there is no CUDA driver of release 11.4 or later ({error})") from error
        self.call("cuInit", 0)
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: object) -> None:
        """Make one call; other threads run meanwhile. Raises Exhausted out of device memory, else Unavailable."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise self._error(name, status)

    def _error(self, name: str, status: int) -> KVStoreError:
        words = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(words))
        said = f"{name}: {(words.value or b'unknown error').decode(errors='replace')} ({status})"
        return Exhausted(f"the device has no memory left: {said}") if status == OUT_OF_MEMORY else Unavailable(said)

    def number(self, name: str, kind: Any, *arguments: object) -> Any:
        """Return the value that a call stores through its first argument."""
        found = kind()
        self.call(name, ctypes.byref(found), *arguments)
        return found.value

    def identity(self, device: int) -> str:
        """Return a name for a device that all processes of the machine agree on."""
        found = Uuid()
        self.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        return f"cuda:{bytes(found.bytes).hex()}"

    @contextmanager
    def within(self, device: int) -> Iterator[None]:
        """Make the device's primary context, which torch uses, too, the calling thread's, and the one before again
        afterwards. The first call begins the context."""
        before = self.number("cuCtxGetCurrent", _pointer)
        self.call("cuCtxSetCurrent", self._context(device))
        try:
            yield
        finally:
            self.call("cuCtxSetCurrent", before)

    def _context(self, device: int) -> int:
        """Return the device's primary context. It is never released: it ends with the process."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self.number("cuDevicePrimaryCtxRetain", _pointer, device)
            return self._contexts[device]


@cache
def driver() -> Driver:
    """Return the process's driver. Raises Unavailable."""
    return Driver()


def allocation(device: int) -> MemoryProperties:
    """Return the properties of memory that a descriptor shares."""
    return MemoryProperties(PINNED, BY_DESCRIPTOR, MemoryLocation(ON_DEVICE, device), None, MemoryFlags())


def access(device: int) -> MemoryAccess:
    """Return the right of a device to its memory."""
    return MemoryAccess(MemoryLocation(ON_DEVICE, device), READ_WRITE)
