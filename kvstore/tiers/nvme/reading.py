"""An opened chunk in a slot: its slabs are read into memory, each verified before a caller sees it.

Reading and checking are one job of a byte mover: with several movers the device is busy while one of them checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    StoredSlabs,
    Trust,
    is_sealed,
    parse_header,
    read_seat,
    sealed_header_bytes,
    slab_range,
    wrong_slabs,
)
from kvstore.errors import DataLoss
from kvstore.seams import EnvelopeRing
from kvstore.seams.memory import Bytes
from kvstore.tiers.contract import Buffer, ChunkName, check_header, host_memory
from kvstore.tiers.nvme.io import DeviceIO, aligned
from kvstore.tiers.nvme.slots import RegionFile


class Owner(Protocol):
    """The tier as an open chunk sees it: it runs the chunk's jobs, and counts their bytes."""

    async def run_read(self, function: Callable[..., Any], *args: object) -> Any:
        """Run a function on a byte mover. Raises the typed error for the function's error."""

    def was_read(self, byte_count: int) -> None: ...

    def closed(self, region: RegionFile, slot: int) -> None: ...


def read_header(
    io: DeviceIO, region: RegionFile, slot: int, name: ChunkName, ring: EnvelopeRing | None = None
) -> ChunkHeader:
    """Return the header of a slot, whose copy is sealed with a key of the ``ring``, or not sealed (None). Raises
    DataLoss when it is not that chunk's."""
    layout = name.layout
    page = aligned(layout.header_bytes if ring is None else sealed_header_bytes(layout.strip_count))
    if page.size > region.slot_bytes:
        raise DataLoss("the slot is too small for this chunk", reason="slot")
    io.read(region.descriptor, region.offset(slot), page)
    header = check_header(name, parse_header(page, layout) if ring is None else _opened(page, layout, ring))
    if not is_seated(page, region, slot):
        raise DataLoss("this copy was written to another place", reason="seat")
    return header


def _opened(page: Bytes, layout: ChunkLayout, ring: EnvelopeRing) -> ChunkHeader:
    if not is_sealed(page):
        raise DataLoss("a copy that was sealed has no envelope any more", reason="envelope")
    header = Trust("none", ring).read_header(page, layout)
    if header is None:
        raise DataLoss("a copy is sealed with a key that this process never had", reason="key")
    return header


def is_seated(header: Bytes, region: RegionFile, slot: int) -> bool:
    """Return True when a header, checked before, was written for the place where it lies. A stray copy of a replaceable
    chunk is erased by no one, and would come back after its key got another value. A sealed copy names its place, and
    its tag covers that; other copies that are never replaced do not (nor did earlier releases)."""
    seat = read_seat(header)
    return seat == region.seat(slot) or (seat == 0 and not is_sealed(header))


class NvmeChunk:
    """An open chunk. Its slot is not reused until it is closed."""

    def __init__(
        self, owner: Owner, io: DeviceIO, region: RegionFile, slot: int, header: ChunkHeader, layout: ChunkLayout
    ) -> None:
        self.header = header
        self._owner = owner
        self._io = io
        self._region = region
        self._slot = slot
        self._layout = layout
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """See ``StoredChunk.read``."""
        await self._read(slabs, StoredSlabs.of(self.header, self._layout, slabs, host_memory(target)))

    async def check(self, slabs: range) -> None:
        """As ``read``, without handing out the bytes."""
        await self._read(slabs, StoredSlabs.of(self.header, self._layout, slabs))

    async def _read(self, slabs: range, stored: StoredSlabs) -> None:
        offset = self._offset(slabs)
        if not await self._owner.run_read(read_slabs, self._io, self._region.descriptor, offset, stored):
            raise wrong_slabs(slabs, "on the device")
        self._owner.was_read(stored.byte_count)

    def _offset(self, slabs: range) -> int:
        """Return the place of stored slabs on the device. Raises DataLoss where they leave the slot."""
        offset, byte_count = slab_range(self.header, self._layout, slabs.start, slabs.stop)
        start = self.header.bytes_before(self._layout) + offset
        if start + byte_count > self._region.slot_bytes:
            raise DataLoss("the chunk does not end where its slot does", reason="slot")
        return self._region.offset(self._slot) + start

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._owner.closed(self._region, self._slot)


def read_slabs(io: DeviceIO, descriptor: int, offset: int, stored: StoredSlabs) -> bool:
    """Read slabs from a place on the device. Returns True when all strips are right. Blocking."""
    room = stored.room(aligned)
    for data in room:
        io.read(descriptor, offset, data)
        offset += data.size
    return stored.are_right(room)
