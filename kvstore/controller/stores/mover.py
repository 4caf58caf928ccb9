"""The byte movers' job: copy strips from staging to the arena, and checksum them. A job touches only extents that its
reservation owns. It reads staging once: the checksum is of the arena's copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.arena import Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, StripRun, strip_run
from kvstore.chunk.checksum import CHECKSUM_BYTES
from kvstore.errors import Internal, KVStoreError
from kvstore.seams.memory import Bytes

JOB_BYTES_MIN, JOB_BYTES_MAX, JOBS = 8 << 20, 32 << 20, 16
"""Handing a job over costs the service's loop as much as a mover needs for a MB: the bytes that came together are cut
into about JOBS jobs. None is so small that the handing over counts, or so large that a mover is busy for long."""
MoveJob = tuple[StripRun, Bytes, Bytes]


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of the strips ``first .. stop`` of a chunk, which lie back to back in ``source`` and in ``target``."""

    layout: ChunkLayout
    header: ChunkHeader
    first: int
    stop: int
    source: Bytes
    target: Bytes

    @property
    def job(self) -> MoveJob:
        """The arguments for ``move``."""
        header = self.header
        return (
            strip_run(self.layout, header.storage_key, header.write_id, self.first, self.stop),
            self.source,
            self.target,
        )

    def wrong(self, rows: bytes) -> KVStoreError | None:
        """Return the error for ``rows`` that cannot be the checksums of the strips; None: they can be."""
        if len(rows) == (self.stop - self.first) * CHECKSUM_BYTES:
            return None
        return Internal(f"a byte mover gave {len(rows)} bytes of checksums for {self.stop - self.first} strips")

    def moved(self, rows: bytes) -> int:
        """Put the checksums that ``move`` returned into the header. Return the number of bytes checksummed."""
        found = np.frombuffer(rows, np.uint8).reshape(-1, CHECKSUM_BYTES)
        self.header.checksums[self.first : self.stop] = found
        return int(self.layout.strip_lengths[self.first : self.stop].sum(dtype=np.uint64))


def moves_of(
    layout: ChunkLayout, header: ChunkHeader, placement: Placement, first: int, stop: int, source: Bytes,
    fill_count: int = 1,
) -> Iterator[Move]:  # fmt: skip
    """Cut the strips ``first .. stop`` into moves, at the ends of extents and at about as many bytes as a job should
    have. ``source``: exactly the strips' bytes. ``fill_count``: how many such runs of strips came together."""
    base = int(layout.strip_offsets[first])
    job_bytes = min(JOB_BYTES_MAX, max(JOB_BYTES_MIN, source.size * fill_count // JOBS))
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
                if size >= job_bytes or not following:
                    at = int(layout.strip_offsets[head]) - base
                    yield Move(layout, header, head, high, source[at : at + size], span.data[head_at:tail_at])
                    size = 0
            start += slab.byte_count


def _end_of(layout: ChunkLayout, slab_index: int, stop: int) -> int:
    """Return the offset at which the strips before ``stop`` end. For the slab's last strip that is the slab's end,
    alignment gap included."""
    slab = layout.slabs[slab_index]
    if stop == slab.strip_first + slab.strip_count:
        return slab.offset + slab.byte_count
    return int(layout.strip_offsets[stop])


def move(strips: StripRun, source: Bytes, target: Bytes) -> bytes:
    """Copy, and return the checksums of the copy, 16 bytes per strip. Blocking. Alignment gaps get zeros, whatever the
    client left there: so copies of a chunk are the same to the byte."""
    return strips.copy(source, target)
