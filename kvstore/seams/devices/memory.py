"""Regions of device memory, and the host's memory in the place of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvstore.seams.mapping import Bytes
from kvstore.seams.memory import Memory


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A run of bytes in the memory of an accelerator."""

    address: int
    byte_count: int
    device: int


class DeviceRegion(Protocol):
    """A run of device memory that this process owns, and the descriptor that shares it."""

    @property
    def descriptor(self) -> int: ...

    @property
    def byte_count(self) -> int: ...

    def write(self, offset: int, source: Sequence[Bytes]) -> None:
        """Copy host memory into the region from ``offset`` on, one piece behind the other. Blocks until all of it is
        there. Raises Unavailable where the device fails."""

    def read(self, offset: int, target: Bytes) -> None:
        """Copy bytes from ``offset`` on to host memory. Blocks. Raises as ``write``."""

    def forget(self, offset: int, byte_count: int) -> None:
        """Tell that the range was freed. A simulation poisons it; real memory does nothing."""

    def close(self) -> None:
        """Idempotent. Processes that map the region keep it."""


class Device(Protocol):
    """An accelerator, or the host in its place."""

    @property
    def identity(self) -> str:
        """The device's name for other processes, which may number devices differently."""

    def allocate(self, byte_count: int) -> DeviceRegion:
        """Return memory of at least ``byte_count`` bytes. Raises Exhausted, Unavailable."""


class HostDevice:
    """The host's memory in the place of a device: the same code runs without one."""

    identity = "cpu"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def allocate(self, byte_count: int) -> HostRegion:
        """See ``Device.allocate``."""
        return HostRegion(self._memory, byte_count)


class HostRegion:
    """Shared memory that others only read."""

    def __init__(self, memory: Memory, byte_count: int) -> None:
        self.byte_count = byte_count
        self._mapping = memory.read_only_to_others("kvstore-hbm", byte_count, is_moved=False)

    @property
    def descriptor(self) -> int:
        """See ``DeviceRegion.descriptor``."""
        return self._mapping.descriptor

    @property
    def bytes(self) -> Bytes:
        """All of it."""
        return self._mapping.bytes

    def write(self, offset: int, source: Sequence[Bytes]) -> None:
        """See ``DeviceRegion.write``."""
        for piece in source:
            np.copyto(self._mapping.bytes[offset : offset + piece.size], piece)
            offset += piece.size

    def read(self, offset: int, target: Bytes) -> None:
        """See ``DeviceRegion.read``."""
        np.copyto(target, self._mapping.bytes[offset : offset + target.size])

    def forget(self, offset: int, byte_count: int) -> None:
        """See ``DeviceRegion.forget``."""
        self._mapping.forget(offset, byte_count)

    def close(self) -> None:
        """See ``DeviceRegion.close``."""
        self._mapping.close()
