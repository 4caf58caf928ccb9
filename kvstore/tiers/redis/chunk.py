"""An opened chunk in a server: its slabs are read into memory, each verified before a caller sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore.chunk import ChunkHeader, StoredSlabs, Trust, slab_range, wrong_slabs
from kvstore.errors import DataLoss
from kvstore.tiers.contract import Buffer, ChunkName, check_header, host_memory
from kvstore.tiers.redis.control import Opened
from kvstore.tiers.redis.moves import PartRead
from kvstore.tiers.redis.names import fields_of, reads_of
from kvstore.tiers.redis.reads import ChunkReads


class RedisReader(Protocol):
    """The tier as an open chunk sees it."""

    async def read(self, reads: ChunkReads, part: PartRead) -> bool:
        """Read a part. Returns True when all strips are right. Raises typed errors."""

    def was_read(self, byte_count: int) -> None:
        """Count bytes that were read and passed their checksums."""


def read_opened(name: ChunkName, found: Opened, trust: Trust) -> ChunkHeader | None:
    """Return the header of the chunk that was found. None: a newer release wrote it, or a node with another key. Raises
    DataLoss when it is not that chunk, or not all of it, or not to be trusted."""
    header = trust.read_header(np.frombuffer(bytearray(found.header), np.uint8), name.layout)
    if header is None:
        return None
    if found.byte_count != header.bytes_before(name.layout):
        raise DataLoss("the chunk's header has another length than it should", reason="header")
    check_header(name, header)
    if found.field_count != 1 + len(fields_of(name.layout, header.stored)):
        raise DataLoss("parts of the chunk are gone", reason="incomplete")
    return header


class RedisChunk:
    """An open chunk. The server may drop it meanwhile."""

    def __init__(self, owner: RedisReader, reads: ChunkReads, header: ChunkHeader, name: ChunkName) -> None:
        self.header = header
        self._owner = owner
        self._reads = reads
        self._layout = name.layout

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """See ``StoredChunk.read``."""
        await self._read(slabs, StoredSlabs.of(self.header, self._layout, slabs, host_memory(target)))

    async def check(self, slabs: range) -> None:
        """As ``read``, without handing out the bytes."""
        await self._read(slabs, StoredSlabs.of(self.header, self._layout, slabs))

    async def _read(self, slabs: range, stored: StoredSlabs) -> None:
        start, byte_count = slab_range(self.header, self._layout, slabs.start, slabs.stop)
        fields = reads_of(self._layout, self.header.write_id, start, start + byte_count, self.header.stored)
        if not await self._owner.read(self._reads, PartRead(fields, stored)):
            raise wrong_slabs(slabs, "from Redis")
        self._owner.was_read(sum(self._layout.slabs[slab].byte_count for slab in slabs))

    def close(self) -> None:
        """Do nothing: an open chunk holds no resources."""
