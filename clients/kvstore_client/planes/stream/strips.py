"""Chunks as messages bring them: strips, each with a checksum."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.chunk.checksum import CHECKSUM_BYTES
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.wire.data import ALIGNMENT
from kvstore_client.arrays import destination
from kvstore_client.planes.parts import kept_seeds


class StreamChunk:
    """One chunk of a prefix, with its header's checksums once the header came. Opaque values, of one slab, ``take``
    their strips into memory of their own."""

    _memory: Bytes = np.empty(0, np.uint8)
    _strip_count = 0

    def __init__(self, part: int, index: int, token_start: int, layout: ChunkLayout) -> None:
        self.part = part
        self.index = index
        self.token_start = token_start
        self.layout = layout
        self.seeds: list[int] = []
        self.checksums = b""

    def introduce(self, header: ChunkHeader) -> None:
        """Take the header: now the chunk's strips can be checked."""
        self.seeds = kept_seeds(header.storage_key, self.layout, header.write_id)
        self.checksums = header.checksums.tobytes()

    def take(self, strips: Strips) -> bool:
        """Add strips to the chunk's own memory. Returns False unless they are its next ones, and match its header."""
        slab, extent = self.layout.slabs[0], strips.extent
        if extent.first != self._strip_count or not strips.is_intact():
            return False
        if not self._strip_count:
            self._memory = destination(slab.byte_count)
        start, size = int(self.layout.strip_offsets[extent.first]), extent.spans[-1][1]
        self._memory[start : start + size] = strips.memory[:size]
        self._strip_count = extent.stop
        return True

    @property
    def is_whole(self) -> bool:
        return self._strip_count == self.layout.slabs[0].strip_count

    def slab(self, _: int) -> Bytes:
        return self._memory

    def is_intact(self, *_: object) -> bool:
        """Return True: only strips that passed their check were taken."""
        return True


class StripExtent(NamedTuple):
    """The place of consecutive strips: ``first .. stop`` of a slab (numbered within it), strip ``number`` of the chunk
    and those after it. ``spans``: (start, stop) of each in a run's bytes."""

    slab: int
    first: int
    stop: int
    number: int
    spans: tuple[tuple[int, int], ...]

    @property
    def byte_count(self) -> int:
        """Bytes of the run, with the padding after the last strip."""
        return -(-self.spans[-1][1] // ALIGNMENT) * ALIGNMENT


class Strips(NamedTuple):
    """Strips of a chunk, in a message's memory."""

    chunk: StreamChunk
    extent: StripExtent
    memory: Bytes

    def is_intact(self) -> bool:
        """Return True when the strips match the chunk's header. Without a header, False."""
        spans, start = self.extent.spans, self.extent.number
        stop, data = start + len(spans), self.memory.data
        seeds = self.chunk.seeds[start:stop]
        if not seeds:
            return False
        found = [xxh3_128_digest(data[low:high], seed) for (low, high), seed in zip(spans, seeds, strict=True)]
        return b"".join(found) == self.chunk.checksums[start * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]


@lru_cache(maxsize=8192)
def extent_of(layout: ChunkLayout, number: int, count: int) -> StripExtent:
    """Return the place of ``count`` strips, from strip ``number`` of a chunk on. Raises DataLoss when they are not one
    slab's."""
    stop = number + count
    if stop > layout.strip_count:
        raise DataLoss("the message names strips that the chunk does not have", reason="strips")
    slab = int(np.searchsorted(layout.slab_firsts, number, side="right")) - 1
    entry = layout.slabs[slab]
    if stop > entry.strip_first + entry.strip_count:
        raise DataLoss("a run of strips reaches beyond its slab", reason="strips")
    starts = (layout.strip_offsets[number:stop] - layout.strip_offsets[number]).tolist()
    ends = [start + length for start, length in zip(starts, layout.strip_lengths[number:stop].tolist(), strict=True)]
    first = number - entry.strip_first
    return StripExtent(slab, first, first + count, number, tuple(zip(starts, ends, strict=True)))
