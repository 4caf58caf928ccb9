"""An opened chunk in a slot: its slabs are read into memory, each verified before a caller sees it.

Reading and checking are one job of a byte mover: with several movers the device is busy while one of them checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    StripMemory,
    StripRun,
    Trust,
    are_right,
    decode_slabs,
    is_sealed,
    parse_header,
    read_seat,
    sealed_header_bytes,
    slab_range,
    slab_runs,
    strip_run,
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
        memory = host_memory(target)
        offset, byte_count = self._place(slabs)
        header, descriptor = self.header, self._region.descriptor
        if header.encoding == "raw":
            runs = slab_runs(self._layout, header.storage_key, header.write_id, slabs, memory, header.seal)
            good = await self._owner.run_read(read_raw, self._io, descriptor, offset, runs, self._expected(slabs))
        else:
            place = (descriptor, offset, byte_count)
            good = await self._owner.run_read(read_encoded, self._io, place, header, self._layout, slabs, memory)
        self._was_read(slabs, good, byte_count)

    async def check(self, slabs: range) -> None:
        """As ``read``, without handing out the bytes."""
        offset, byte_count = self._place(slabs)
        header = self.header
        if header.encoding == "raw":
            first, stop = self._layout.strips_of(slabs)
            strips = strip_run(self._layout, header.storage_key, header.write_id, first, stop, header.seal)
            place = (self._region.descriptor, offset, byte_count)
            good = await self._owner.run_read(check_raw, self._io, place, strips, self._expected(slabs))
            self._was_read(slabs, good, byte_count)
        else:
            await self.read(slabs, [aligned(self._layout.slabs[slab].byte_count) for slab in slabs])

    def _place(self, slabs: range) -> tuple[int, int]:
        """Return (offset on the device, bytes) of slabs as stored. Raises DataLoss where they leave the slot."""
        offset, byte_count = slab_range(self.header, self._layout, slabs.start, slabs.stop)
        start = self.header.bytes_before(self._layout) + offset
        if start + byte_count > self._region.slot_bytes:
            raise DataLoss("the chunk does not end where its slot does", reason="slot")
        return self._region.offset(self._slot) + start, byte_count

    def _expected(self, slabs: range) -> bytes:
        """Return the checksums that the strips must have."""
        return self.header.checksums_of(*self._layout.strips_of(slabs))

    def _was_read(self, slabs: range, good: bool, byte_count: int) -> None:
        if not good:
            raise DataLoss(
                f"slabs {slabs.start}..{slabs.stop} on the device fail their check", reason="checksum",
                slab=slabs.start,
            )  # fmt: skip
        self._owner.was_read(byte_count)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._owner.closed(self._region, self._slot)


def read_raw(io: DeviceIO, descriptor: int, offset: int, runs: Sequence[StripMemory], expected: bytes) -> bool:
    """Fill runs of memory, which lie one after the other on the device. Returns True when all strips are right.
    Blocking."""
    for data, _ in runs:
        io.read(descriptor, offset, data)
        offset += data.size
    good = are_right(runs, expected)
    if good:
        for data, strips in runs:
            strips.zero_gaps(data)
    return good


def check_raw(io: DeviceIO, place: tuple[int, int, int], strips: StripRun, expected: bytes) -> bool:
    """Return True when all strips at ``place`` (descriptor, offset, bytes) are right. Blocking."""
    descriptor, offset, byte_count = place
    return read_raw(io, descriptor, offset, [(aligned(byte_count), strips)], expected)


def read_encoded(
    io: DeviceIO, place: tuple[int, int, int], header: ChunkHeader, layout: ChunkLayout, slabs: range,
    target: Sequence[Bytes],
) -> bool:  # fmt: skip
    """Read slabs from ``place`` (descriptor, offset, bytes), and decode them. Returns True when all were right.
    Blocking."""
    descriptor, offset, byte_count = place
    buffer = aligned(byte_count)
    io.read(descriptor, offset, buffer)
    return decode_slabs(header, layout, slabs, buffer, target)
