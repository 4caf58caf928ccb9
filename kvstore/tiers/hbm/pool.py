"""One region of a device's memory: extents, and the page of their generations."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.seams import Memory
from kvstore.seams.devices import Device
from kvstore.seams.fence import fence
from kvstore.seams.runs import FreeRuns
from kvstore.units import PAGE_BYTES

CHUNK_BYTES_MIN = 2 * PAGE_BYTES
SLOT_COUNT_MAX = 1 << 20
SLOT_GENERATIONS = np.uint64(1 << 40)
"""Generations of one slot: no slot has held so many chunks."""


class PoolExtent(NamedTuple):
    """The place of one copy: a run of bytes, its generation slot, and the value that the slot must keep."""

    offset: int
    byte_count: int
    slot: int
    generation: int


class Pool:
    """Hands out extents of one region. A copy's generation changes before its bytes are given to another.

    Raises: Exhausted or Unavailable where the device, or the machine, does not share the memory.
    """

    def __init__(self, device: Device, memory: Memory, capacity_bytes: int, first_generation: int = 1) -> None:
        """``first_generation``: as the arena's."""
        self.identity = device.identity
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.region = device.allocate(self.capacity_bytes)
        slot_count = max(1, min(self.capacity_bytes // CHUNK_BYTES_MIN, SLOT_COUNT_MAX))
        try:
            self.generations = memory.read_only_to_others(
                "kvstore-hbm-generations", -(-slot_count * 8 // PAGE_BYTES) * PAGE_BYTES, is_moved=False
            )
        except BaseException:
            self.region.close()
            raise
        self._values: NDArray[np.uint64] = self.generations.bytes.view(np.uint64)
        self._values[:slot_count] = first_generation + np.arange(slot_count, dtype=np.uint64) * SLOT_GENERATIONS
        self._slots = list(range(slot_count - 1, -1, -1))
        self._runs = FreeRuns()
        self._runs.give_back(0, self.capacity_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes that no copy has."""
        return self._runs.free_bytes

    def allocate(self, byte_count: int) -> PoolExtent | None:
        """Return room for a copy, in one run; None where there is none."""
        offset = self._runs.take(byte_count) if self._slots else None
        if offset is None:
            return None
        slot = self._slots.pop()
        return PoolExtent(offset, byte_count, slot, int(self._values[slot]))

    def free(self, extent: PoolExtent) -> None:
        """Give a copy's bytes away. Its generation changes first: from here on every reader sees a miss."""
        if not self._values.size:  # closed: a last reader ended after it
            return
        assert int(self._values[extent.slot]) == extent.generation, "freed twice"
        self._values[extent.slot] += np.uint64(1)
        fence()  # and it changes before any byte does, for readers on other processors too
        self.region.forget(extent.offset, extent.byte_count)
        self._runs.give_back(extent.offset, extent.byte_count)
        self._slots.append(extent.slot)

    def close(self) -> None:
        """Let go of the memory. Clients keep their own mappings until they notice that the server is gone."""
        self._values = np.empty(0, np.uint64)
        self.generations.close()
        self.region.close()
