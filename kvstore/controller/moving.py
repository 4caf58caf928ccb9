"""The byte movers' job: staging to arena, checksummed. Runs on worker threads, touches only extents and checksum
rows that a reservation owns. Staging is read once: the checksum is of the arena's copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from kvstore.arena import Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, strip_seeds
from kvstore.seams.memory import Bytes

JOB_BYTES = 8 << 20
"""Large enough for memcpy's streaming stores (twice the rate of short copies), small enough to share."""


@dataclass(frozen=True, slots=True)
class Move:
    """Strips ``first .. stop`` of a chunk, back to back in ``source`` and in ``target``. The rows of
    ``header.checksums`` [strips, 16] that belong to them are written."""

    layout: ChunkLayout
    header: ChunkHeader
    first: int
    stop: int
    source: Bytes
    target: Bytes

    @property
    def byte_count(self) -> int:
        return int(self.target.size)


def moves_of(
    layout: ChunkLayout, header: ChunkHeader, placement: Placement, first: int, stop: int, source: Bytes
) -> Iterator[Move]:
    """Cut strips ``first .. stop``, whose bytes begin ``source``, where extents end and at about JOB_BYTES."""
    base = int(layout.strip_offsets[first])
    for span in placement.spans:
        start = 0
        size = 0
        for piece in range(span.piece_first, span.piece_stop):
            if piece == 0:
                start += layout.header_bytes
                continue
            slab = layout.slabs[piece - 1]
            low, high = max(first, slab.strip_first), min(stop, slab.strip_first + slab.strip_count)
            if low < high and not size:
                head, head_at = low, start + int(layout.strip_offsets[low]) - slab.offset
            if low < high:
                end = _end_of(layout, piece - 1, high)
                tail_at = start + end - slab.offset
                size = tail_at - head_at
                following = piece + 1 < span.piece_stop and high < stop
                if size >= JOB_BYTES or not following:
                    at = int(layout.strip_offsets[head]) - base
                    yield Move(layout, header, head, high, source[at : at + size], span.data[head_at:tail_at])
                    size = 0
            start += slab.byte_count


def _end_of(layout: ChunkLayout, slab_index: int, stop: int) -> int:
    """Where the bytes of the strips before ``stop`` end: at the slab's end for its last, gap included."""
    slab = layout.slabs[slab_index]
    if stop == slab.strip_first + slab.strip_count:
        return slab.offset + slab.byte_count
    return int(layout.strip_offsets[stop])


def move(each: Move) -> int:
    """Copy, then checksum the copy. Returns the bytes checksummed. Alignment gaps get zeros, whatever the client
    left there: copies of a chunk are the same to the byte."""
    layout, header = each.layout, each.header
    seeds = strip_seeds(header.storage_key, layout, header.write_id, each.first, each.stop)
    base = int(layout.strip_offsets[each.first])
    offsets = layout.strip_offsets[each.first : each.stop].astype(np.int64) - base
    ends = offsets + layout.strip_lengths[each.first : each.stop]
    # The last gap lies outside what the client had to stage: it may be missing from the source.
    np.copyto(each.target[: each.source.size], each.source)
    nexts = np.append(offsets[1:], each.target.size)
    for gap in np.flatnonzero(ends < nexts).tolist():
        each.target[ends[gap] : nexts[gap]] = 0
    rows = b"".join(
        xxhash.xxh3_128_digest(each.target[start:end].data, seed)
        for start, end, seed in zip(offsets.tolist(), ends.tolist(), seeds, strict=True)
    )
    header.checksums[each.first : each.stop] = np.frombuffer(rows, np.uint8).reshape(-1, 16)
    return int((ends - offsets).sum())
