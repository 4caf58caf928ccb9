"""Reads the headers of chunks in mapped memory: a place counts only if the chunk that was asked for lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvstore.chunk import ChunkLayout
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.spec import Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.parts import asked_header, part_layout
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory


def read_chunk(
    session: MappedMemory, wanted: Wanted, entry: pb.ResidentChunk, digest: bytes, exactness: Exactness
) -> Chunk:
    """Return the chunk at an entry's place. Raises DataLoss where another chunk lies, or none; Unavailable where the
    session has ended, or has no such region."""
    layout = part_layout(wanted.spec, wanted.hidden_layers, entry.part, entry.token_count)
    extents = [session.region(each.region)[each.offset : each.offset + each.byte_count] for each in entry.extents]
    if not _hold(extents, layout):
        raise DataLoss("the extents do not hold a chunk of this model", reason="extents")
    data = extents[0][: layout.header_bytes].tobytes()
    header = asked_header(data, layout, wanted, entry.part, digest, exactness)
    home = None
    if len(entry.extents) == 1:
        extent = entry.extents[0]
        home = (session.region(extent.region), extent.region, extent.offset)
    start = entry.index * wanted.spec.chunk_tokens
    found = Chunk(entry.part, start, layout, extents, entry.generation_slot, entry.generation, header, home)
    pool = session.pool_for(wanted) if entry.HasField("device") else None
    near = pool.found(found, entry.device) if pool is not None else None
    return found if near is None else replace(found, near=near)


def _hold(extents: Sequence[Bytes], layout: ChunkLayout) -> bool:
    """Return True when extents are as long as a chunk, and end between its pieces: no slab is cut in two."""
    ends = list(accumulate(extent.size for extent in extents))
    return ends[-1:] == [layout.total_bytes] and (len(ends) == 1 or set(ends) <= set(accumulate(layout.piece_bytes)))
