"""The byte movers' job: staging to arena, checksummed. Runs on worker threads, touches only extents and checksum
rows that a reservation owns. Staging is read once: the checksum is of the arena's copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.chunk import ChunkLayout, checksum_strips
from kvstore.chunk.checksum import Checksums
from kvstore.seams.memory import Bytes

JOB_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Move:
    """Strips ``first .. first+count`` of one slab: from ``source`` into the slab's ``target``."""

    layout: ChunkLayout
    slab_index: int
    first: int
    strip_count: int
    source: Bytes
    target: Bytes
    seeds: list[int]
    checksums: Checksums
    """[strips of the chunk, 16]; the rows of these strips are written."""


def move(moves: list[Move]) -> int:
    """Copy and checksum. Returns the bytes moved."""
    moved = 0
    for each in moves:
        slab = each.layout.slabs[each.slab_index]
        base = slab.strip_first + each.first
        offsets = each.layout.strip_offsets[base : base + each.strip_count].astype(np.int64)
        lengths = each.layout.strip_lengths[base : base + each.strip_count].astype(np.int64)
        start = int(offsets[0]) - slab.offset
        stop = int(offsets[-1] + lengths[-1]) - slab.offset
        np.copyto(each.target[start:stop], each.source[: stop - start])
        _zero_gaps(each, offsets - slab.offset, lengths, slab.byte_count)
        rows = checksum_strips(each.target, each.layout, each.slab_index, each.seeds, each.first, each.strip_count)
        each.checksums[base : base + each.strip_count] = np.frombuffer(rows, np.uint8).reshape(-1, 16)
        moved += stop - start
    return moved


def _zero_gaps(each: Move, offsets: np.ndarray, lengths: np.ndarray, slab_bytes: int) -> None:
    """Alignment gaps hold zeros, whatever the client left there: copies of a chunk are the same to the byte."""
    ends = offsets + lengths
    last = each.first + each.strip_count == each.layout.slabs[each.slab_index].strip_count
    nexts = np.append(offsets[1:], slab_bytes if last else -(-int(ends[-1]) // 64) * 64)
    for end, following in zip(ends[ends < nexts].tolist(), nexts[ends < nexts].tolist(), strict=True):
        each.target[end:following] = 0


def batches(moves: list[Move], worker_count: int) -> list[list[Move]]:
    """Cut moves into jobs of about JOB_BYTES, at least one per worker where there is enough to share."""
    total = sum(each.layout.slabs[each.slab_index].byte_count for each in moves)
    size = max(1, min(JOB_BYTES, -(-total // worker_count)))
    jobs: list[list[Move]] = [[]]
    filled = 0
    for each in moves:
        if filled >= size:
            jobs.append([])
            filled = 0
        jobs[-1].append(each)
        filled += each.layout.slabs[each.slab_index].byte_count
    return [job for job in jobs if job]
