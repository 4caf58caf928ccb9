"""Chunks as messages bring them: strips, each of which is hashed."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_128_digest

from kvstore.chunk import ChunkHeader, ChunkLayout, strip_seeds
from kvstore.chunk.checksum import CHECKSUM_BYTES
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.wire.data import ALIGNMENT

_kept_seeds = lru_cache(maxsize=512)(strip_seeds)


class StreamChunk:
    """One chunk of a prefix: what its header says, once that came."""

    def __init__(self, part: int, index: int, token_start: int, layout: ChunkLayout) -> None:
        self.part = part
        self.index = index
        self.token_start = token_start
        self.layout = layout
        self.seeds: list[int] = []
        self.checksums = b""

    def introduce(self, header: ChunkHeader) -> None:
        """Its header came: now its strips can be told from others."""
        self.seeds = _kept_seeds(header.storage_key, self.layout, header.write_id)
        self.checksums = header.checksums.tobytes()


class StripExtent(NamedTuple):
    """Where consecutive strips lie: ``first .. stop`` of a slab (numbered within it), strip ``number`` of the chunk and
    those after it. ``spans``: (start, stop) of each in a run's bytes."""

    slab: int
    first: int
    stop: int
    number: int
    spans: tuple[tuple[int, int], ...]

    @property
    def byte_count(self) -> int:
        """With the padding after the last."""
        return -(-self.spans[-1][1] // ALIGNMENT) * ALIGNMENT


class Strips(NamedTuple):
    """Strips of a chunk, as they lie in a message."""

    chunk: StreamChunk
    extent: StripExtent
    memory: Bytes

    def is_intact(self) -> bool:
        """Whether they are what the chunk's header says. Without a header, no."""
        spans, start = self.extent.spans, self.extent.number
        stop, data = start + len(spans), self.memory.data
        seeds = self.chunk.seeds[start:stop]
        if not seeds:
            return False
        found = [xxh3_128_digest(data[low:high], seed) for (low, high), seed in zip(spans, seeds, strict=True)]
        return b"".join(found) == self.chunk.checksums[start * CHECKSUM_BYTES : stop * CHECKSUM_BYTES]


@lru_cache(maxsize=8192)
def extent_of(layout: ChunkLayout, number: int, count: int) -> StripExtent:
    """Where ``count`` strips lie, from strip ``number`` of a chunk on. Raises DataLoss when they are not one slab's."""
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
