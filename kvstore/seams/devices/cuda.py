"""A CUDA device's memory: allocated here and exported by descriptor, or mapped from another process's descriptor."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial

from kvstore.errors import Unavailable
from kvstore.seams.devices.driver import (
    BY_DESCRIPTOR,
    NON_BLOCKING,
    SHARES_BY_DESCRIPTOR,
    access,
    allocation,
    driver,
)
from kvstore.seams.devices.memory import DeviceMemory
from kvstore.seams.mapping import Bytes
from kvstore.seams.memory import joined


def ordinal_of(name: str) -> int:
    """Return the number in a device's name, ``cuda`` or ``cuda:N``, as this process numbers devices."""
    return int(name.partition(":")[2] or 0)


def device_identity(ordinal: int) -> str:
    """Return the name of a device for other processes. Raises Unavailable."""
    return driver().identity(driver().number("cuDeviceGet", ctypes.c_int, ordinal))


class CudaDevice:
    """A CUDA device, of which this process shares memory. Raises Unavailable where there is none, or it cannot."""

    def __init__(self, ordinal: int) -> None:
        self._device: int = driver().number("cuDeviceGet", ctypes.c_int, ordinal)
        self.identity = driver().identity(self._device)
        if not driver().number("cuDeviceGetAttribute", ctypes.c_int, SHARES_BY_DESCRIPTOR, self._device):
            raise Unavailable(f"cuda:{ordinal} cannot share memory by descriptor")

    def allocate(self, byte_count: int) -> CudaRegion:
        """See ``Device.allocate``."""
        return CudaRegion(self._device, byte_count)


class CudaRegion:
    """Memory of a device that other processes map by its descriptor."""

    def __init__(self, device: int, byte_count: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        cuda = driver()
        with cuda.within(device):
            properties = allocation(device)
            step: int = cuda.number("cuMemGetAllocationGranularity", ctypes.c_size_t, ctypes.byref(properties), 0)
            self.byte_count = -(-byte_count // step) * step
            handle: int = cuda.number("cuMemCreate", ctypes.c_ulonglong, self.byte_count, ctypes.byref(properties), 0)
            try:
                self.descriptor: int = cuda.number(
                    "cuMemExportToShareableHandle", ctypes.c_int, handle, BY_DESCRIPTOR, 0
                )
                os.set_inheritable(self.descriptor, False)
                try:
                    self._memory, self._unmap = _mapped(device, handle, self.byte_count)
                except BaseException:
                    os.close(self.descriptor)
                    raise
            finally:
                cuda.call("cuMemRelease", handle)  # the mapping and the descriptor keep the memory
            try:
                self._stream: int = cuda.number("cuStreamCreate", ctypes.c_void_p, NON_BLOCKING)
            except BaseException:
                self.close()
                raise

    def write(self, offset: int, source: Sequence[Bytes]) -> None:
        """See ``DeviceRegion.write``."""
        cuda = driver()
        with self._lock, cuda.within(self._device):  # the stream belongs to one caller until its copies have ended
            try:
                for piece in joined(source):
                    address = self._memory.address + offset
                    cuda.call("cuMemcpyHtoDAsync_v2", address, piece.ctypes.data, piece.size, self._stream)
                    offset += piece.size
            finally:
                cuda.call("cuStreamSynchronize", self._stream)

    def read(self, offset: int, target: Bytes) -> None:
        """See ``DeviceRegion.read``."""
        cuda, address = driver(), self._memory.address + offset
        with self._lock, cuda.within(self._device):
            cuda.call("cuMemcpyDtoHAsync_v2", target.ctypes.data, address, target.size, self._stream)
            cuda.call("cuStreamSynchronize", self._stream)

    def forget(self, offset: int, byte_count: int) -> None:
        """See ``DeviceRegion.forget``."""

    def close(self) -> None:
        """See ``DeviceRegion.close``."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self._unmap()


class MappedRegion:
    """Another process's region, mapped here for as long as the object lives. ``__cuda_array_interface__``: torch makes
    a tensor of it, which keeps the object.

    Raises: Unavailable where the driver refuses it.
    """

    def __init__(self, ordinal: int, descriptor: int, byte_count: int) -> None:
        """``descriptor``: the region's; the caller closes it."""
        cuda = driver()
        device: int = cuda.number("cuDeviceGet", ctypes.c_int, ordinal)
        with cuda.within(device):
            handle: int = cuda.number(
                "cuMemImportFromShareableHandle", ctypes.c_ulonglong, ctypes.c_void_p(descriptor), BY_DESCRIPTOR
            )
            try:
                memory, unmap = _mapped(device, handle, byte_count)
            finally:
                cuda.call("cuMemRelease", handle)
        weakref.finalize(self, unmap).atexit = False
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "shape": (byte_count,),
            "typestr": "|u1",
            "version": 2,
        }


def _mapped(device: int, handle: int, byte_count: int) -> tuple[DeviceMemory, partial[None]]:
    """Map an allocation, and return its memory and the function that unmaps it. Raises Unavailable, Exhausted."""
    cuda = driver()
    address: int = cuda.number("cuMemAddressReserve", ctypes.c_ulonglong, byte_count, 0, 0, 0)
    try:
        cuda.call("cuMemMap", address, byte_count, 0, handle, 0)
        try:
            cuda.call("cuMemSetAccess", address, byte_count, ctypes.byref(access(device)), 1)
        except BaseException:
            cuda.call("cuMemUnmap", address, byte_count)
            raise
    except BaseException:
        cuda.call("cuMemAddressFree", address, byte_count)
        raise
    return DeviceMemory(address, byte_count, device), partial(_unmap, os.getpid(), device, address, byte_count)


def _unmap(owner_pid: int, device: int, address: int, byte_count: int) -> None:
    """Unmap memory that no copy uses any more. A fork has no context, and nothing to unmap."""
    if os.getpid() != owner_pid:
        return
    cuda = driver()
    with cuda.within(device):
        cuda.call("cuMemUnmap", address, byte_count)
        cuda.call("cuMemAddressFree", address, byte_count)
