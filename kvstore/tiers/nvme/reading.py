"""A chunk in a slot, opened: its slabs into memory, each verified before anybody is told.

Reading and checking are jobs of different movers: the device is never kept waiting for a checksum, which wants the
interpreter for itself once per strip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvstore.chunk import ChunkHeader, ChunkLayout, decode_slab, parse_header, slab_range, strip_seeds
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.tiers.contract import ChunkName, check_header
from kvstore.tiers.nvme.io import DeviceIO, aligned, joined
from kvstore.tiers.nvme.regions import Region


class Owner(Protocol):
    """The tier, to a chunk that is open: where its jobs run, and who is told of them."""

    async def run_read(self, function: Callable[..., Any], *args: object) -> Any:
        """With the device. Raises the typed error of what it raised."""

    async def run_check(self, function: Callable[..., Any], *args: object) -> Any:
        """With the processor."""

    def was_read(self, byte_count: int) -> None: ...

    def closed(self, region: Region, slot: int) -> None: ...


def read_header(io: DeviceIO, region: Region, slot: int, name: ChunkName) -> ChunkHeader:
    """The header of a slot. Raises DataLoss when it is not that chunk's."""
    page = aligned(name.layout.header_bytes)
    if page.size > region.slot_bytes:
        raise DataLoss("the slot is too small for this chunk", reason="slot")
    io.read(region.descriptor, region.offset(slot), page)
    return check_header(name, parse_header(page, name.layout))


class NvmeChunk:
    """An open chunk. Its slot is nobody else's until it is closed."""

    def __init__(
        self, owner: Owner, io: DeviceIO, region: Region, slot: int, header: ChunkHeader, layout: ChunkLayout
    ) -> None:
        self.header = header
        self._owner = owner
        self._io = io
        self._region = region
        self._slot = slot
        self._layout = layout
        self._seeds = strip_seeds(header.storage_key, layout, header.write_id)
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Bytes]) -> None:
        """See ``StoredChunk.read``."""
        stored = await self._owner.run_read(self._read, slabs, target)
        await self._owner.run_check(self._check, slabs, stored, target)
        self._owner.was_read(sum(each.size for each in target))

    def _read(self, slabs: range, target: Sequence[Bytes]) -> Sequence[Bytes]:
        """The stored bytes of each slab: in their place where they are raw."""
        header, layout, region = self.header, self._layout, self._region
        offset, byte_count = slab_range(header, layout, slabs.start, slabs.stop)
        start = layout.header_bytes + offset
        if start + byte_count > region.slot_bytes:
            raise DataLoss("the chunk does not end where its slot does", reason="slot")
        device_offset = region.offset(self._slot) + start
        if header.encoding == "raw":
            for run in joined(target):
                self._io.read(region.descriptor, device_offset, run)
                device_offset += run.size
            return target
        buffer = aligned(byte_count)
        self._io.read(region.descriptor, device_offset, buffer)
        bounds = [slab_range(header, layout, slab, slab + 1) for slab in slabs]
        return [buffer[at - offset : at - offset + size] for at, size in bounds]

    def _check(self, slabs: range, stored: Sequence[Bytes], target: Sequence[Bytes]) -> None:
        for slab, source, into in zip(slabs, stored, target, strict=True):
            if not decode_slab(self.header, self._layout, slab, source, into, self._seeds):
                raise DataLoss(f"slab {slab} on the device fails its check", reason="checksum", slab=slab)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._owner.closed(self._region, self._slot)
