"""A raw chunk that lies somewhere as one run of bytes, opened."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from kvstore.chunk import ChunkHeader, decode_slab, parse_header, strip_seeds
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.tiers import Buffer, ChunkName, check_header
from kvstore.tiers.contract import host_memory
from tests.fakes.switches import Switch, Switches

Load = Callable[[int, int], Awaitable[bytes]]
"""(offset, byte count) -> these bytes of the chunk, or fewer where it ends early. Raises KVStoreError."""


async def opened(
    name: ChunkName, load: Load, switches: Switches, was_read: Callable[[int], None], closed: Callable[[], None]
) -> FakeChunk:
    """Raises DataLoss where it is not that chunk; ``closed`` is called then, too."""
    try:
        page = _array(await load(0, name.layout.header_bytes))
        if switches.is_on(Switch.GARBLED):
            page[page.size // 2] ^= 1
        header = check_header(name, parse_header(page, name.layout))
    except BaseException:
        closed()
        raise
    return FakeChunk(header, name, load, switches, was_read, closed)


class FakeChunk:
    """Each slab is loaded, decoded and checked by itself."""

    def __init__(
        self, header: ChunkHeader, name: ChunkName, load: Load, switches: Switches, was_read: Callable[[int], None],
        closed: Callable[[], None],
    ) -> None:  # fmt: skip
        self.header = header
        self._layout = name.layout
        self._load = load
        self._switches = switches
        self._was_read = was_read
        self._closed = closed
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        await self._switches.before("read")
        header, layout = self.header, self._layout
        seeds = strip_seeds(header.storage_key, layout, header.write_id)
        for slab, into in zip(slabs, host_memory(target), strict=True):
            offset = layout.header_bytes + sum(each.byte_count for each in layout.slabs[:slab])
            stored = _array(await self._load(offset, layout.slabs[slab].byte_count))
            if stored.size and self._switches.is_on(Switch.CORRUPT):
                stored[0] ^= 1
            if not decode_slab(header, layout, slab, stored, into, seeds):
                raise DataLoss(f"slab {slab} of the fake fails its check", reason="checksum", slab=slab)
            self._was_read(into.size)

    async def check(self, slabs: range) -> None:
        await self.read(slabs, [np.empty(self._layout.slabs[slab].byte_count, np.uint8) for slab in slabs])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._closed()


def _array(data: bytes) -> Bytes:
    return np.frombuffer(bytearray(data), np.uint8)
