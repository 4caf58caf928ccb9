"""The arena: regions, extents, generations."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from kvstore.arena.placement import Extent, ExtentSpan, Placement
from kvstore.arena.region import Region
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.seams import FaultPoints, Memory
from kvstore.seams.fence import fence
from kvstore.seams.memory import Bytes
from kvstore.units import PAGE_BYTES

CHUNK_BYTES_MIN = 2 * PAGE_BYTES
"""The smallest chunk: a header page and a slab page. Bounds the number of generation slots."""
SLOT_COUNT_MAX = 1 << 22
SLOT_GENERATIONS = np.uint64(1 << 40)
"""Generations of one slot: no slot has held so many chunks."""
_log = logging.getLogger("kvstore.arena")


class Arena:
    """Hands out extents of shared regions, up to ``capacity_bytes``.

    Raises: Unavailable or Exhausted when the machine shares no memory at all. If only a later region fails, the arena
    goes on with the regions that it has.
    """

    def __init__(
        self, memory: Memory, faults: FaultPoints, *, capacity_bytes: int, region_bytes: int, first_generation: int = 1
    ) -> None:  # fmt: skip
        """``first_generation``: drawn at each start, so that nobody takes a place that an earlier start named for one
        of this start. Each slot begins at another number, so that nobody watches another chunk's generation."""
        self.capacity_bytes = capacity_bytes // PAGE_BYTES * PAGE_BYTES
        self.region_bytes = min(region_bytes, self.capacity_bytes)
        self._memory = memory
        self._faults = faults
        self.regions: list[Region] = []
        slot_count = max(1, min(self.capacity_bytes // CHUNK_BYTES_MIN, SLOT_COUNT_MAX))
        self.generations_bytes = -(-slot_count * 8 // PAGE_BYTES) * PAGE_BYTES
        self.generations = memory.read_only_to_others("kvstore-generations", self.generations_bytes)
        self._values: NDArray[np.uint64] = self.generations.bytes.view(np.uint64)
        self._values[:slot_count] = first_generation + np.arange(slot_count, dtype=np.uint64) * SLOT_GENERATIONS
        self._slots = list(range(slot_count - 1, -1, -1))
        self._is_refused = False
        self.used_bytes = 0
        self.chunk_count = 0

    @property
    def prefaulted_bytes(self) -> int:
        return sum(region.backed for region in self.regions)

    def unbacked(self) -> Region | None:
        """Return the first region that is not backed by pages to its end, a new one if need be; None when all are."""
        return next((each for each in self.regions if each.backed < each.byte_count), None) or self._open()

    def _open(self) -> Region | None:
        """Open one more region, while the capacity has room for it and the machine shares memory."""
        opened = sum(each.byte_count for each in self.regions)
        size = min(self.region_bytes, self.capacity_bytes - opened)
        if size <= 0:
            return None
        try:
            mapping = self._memory.read_only_to_others(f"kvstore-region-{len(self.regions)}", size)
        except KVStoreError as error:
            if not self.regions:
                raise
            if not self._is_refused:
                _log.warning("the arena grows no more", extra={"reason": error.message, "regions": len(self.regions)})
            self._is_refused = True
            return None
        self._is_refused = False
        self.regions.append(Region(len(self.regions), mapping, size))
        return self.regions[-1]

    def _grow(self, byte_count: int) -> bool:
        """Make memory usable that is not backed yet. False when there is none."""
        region = next((each for each in self.regions if each.usable < each.byte_count), None) or self._open()
        if region is None:
            return False
        region.extend(min(byte_count, region.byte_count - region.usable))
        return True

    def allocate(self, piece_bytes: tuple[int, ...]) -> Placement | None:
        """Return room for a chunk's pieces, contiguous if that fits, else split; None when there is no room.

        Memory that was never touched is used only when no touched memory is free: its first write is slow.
        Raises: InvalidRequest when the chunk could never fit.
        """
        total = sum(piece_bytes)
        if total > self.capacity_bytes or max(piece_bytes) > self.region_bytes:
            raise InvalidRequest(
                f"a chunk of {total} bytes does not fit the arena: raise arena.capacity_bytes "
                f"({self.capacity_bytes}) or arena.region_bytes ({self.region_bytes}), or lower chunk_tokens",
                byte_count=total,
            )
        if not self._slots:
            return None
        while self.has_bytes(total):
            extents = self._contiguous(total) or self._split(piece_bytes)
            if extents:
                return self._place(extents, piece_bytes)
            if not self._grow(max(total, self.region_bytes // 16)):
                return None
        return None

    def has_bytes(self, byte_count: int) -> bool:
        """Return True when so many bytes are free, in one run or in many."""
        return self.capacity_bytes - self.used_bytes >= byte_count

    def run_from(self, placement: Placement, byte_count: int) -> list[int] | None:
        """Return the generation slots of the placements, this one first, without which ``byte_count`` bytes would be
        free in one run that begins where it does; None where the region ends before."""
        region, start = self.regions[placement.extents[0].region], placement.extents[0].offset
        found: dict[int, None] = {}
        at = start
        while at < start + byte_count:
            slot, size = region.owners.get(at) or (None, region.size_at(at))
            if not size:
                return None
            if slot is not None:
                found[slot] = None
            at += size
        return list(found)

    def _contiguous(self, total: int) -> list[Extent]:
        for region in self.regions:
            offset = region.take(total)
            if offset is not None:
                return [Extent(region.index, offset, total)]
        return []

    def _split(self, piece_bytes: tuple[int, ...]) -> list[Extent]:
        extents: list[Extent] = []
        first = 0
        for region in self.regions:
            while first < len(piece_bytes):
                found = region.take_run(piece_bytes[first:])
                if found is None:
                    break
                offset, count = found
                extents.append(Extent(region.index, offset, sum(piece_bytes[first : first + count])))
                first += count
        if first == len(piece_bytes):
            return extents
        for extent in extents:
            self.regions[extent.region].give_back(extent.offset, extent.byte_count)
        return []

    def _place(self, extents: list[Extent], piece_bytes: tuple[int, ...]) -> Placement:
        slot = self._slots.pop()
        pieces: list[Bytes] = []
        spans: list[ExtentSpan] = []
        for extent in extents:
            data = self.regions[extent.region].mapping.bytes
            self.regions[extent.region].owners[extent.offset] = slot, extent.byte_count
            offset, end = extent.offset, extent.offset + extent.byte_count
            first = len(pieces)
            while offset < end:
                size = piece_bytes[len(pieces)]
                pieces.append(data[offset : offset + size])
                offset += size
            spans.append(ExtentSpan(first, len(pieces), data[extent.offset : end]))
        placement = Placement(slot, int(self._values[slot]), tuple(extents), tuple(pieces), tuple(spans))
        self.used_bytes += placement.byte_count
        self.chunk_count += 1
        return placement

    def free(self, placement: Placement) -> None:
        """Give a chunk's bytes away. Its generation changes first: from here on every reader sees a miss."""
        assert int(self._values[placement.slot]) == placement.generation, "freed twice"
        self._values[placement.slot] += np.uint64(1)
        fence()  # and it changes before any byte does, for readers on other processors too
        self._faults.reach("arena.free.bumped")
        for extent in placement.extents:
            region = self.regions[extent.region]
            del region.owners[extent.offset]
            region.mapping.forget(extent.offset, extent.byte_count)
            region.give_back(extent.offset, extent.byte_count)
        self._slots.append(placement.slot)
        self.used_bytes -= placement.byte_count
        self.chunk_count -= 1
