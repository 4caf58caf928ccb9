"""Reads the headers of chunks in mapped memory: a place counts only if the chunk that was asked for lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from kvstore.chunk import ChunkLayout, layout_of, parse_header
from kvstore.errors import DataLoss
from kvstore.keys import fingerprint
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.mapped import MappedMemory


def _named(wanted: Wanted, part: int) -> tuple[CacheKind, int | None]:
    """Return the kind of cache of a part, and its layer where it is hidden states."""
    return (wanted.spec.kind, None) if part == 0 else (CacheKind.E, wanted.hidden_layers[part - 1])


def layout_at(wanted: Wanted, entry: pb.ResidentChunk) -> ChunkLayout:
    """Return the layout of the chunk that an entry names."""
    kind, layer = _named(wanted, entry.part)
    return layout_of(wanted.spec, kind, entry.token_count, layer)


def read_chunk(
    session: MappedMemory, wanted: Wanted, entry: pb.ResidentChunk, digest: bytes, exactness: Exactness
) -> Chunk:
    """Return the chunk at an entry's place. Raises DataLoss where another chunk lies, or none; Unavailable where the
    session has ended, or has no such region."""
    layout = layout_at(wanted, entry)
    kind, layer = _named(wanted, entry.part)
    extents = [session.region(each.region)[each.offset : each.offset + each.byte_count] for each in entry.extents]
    if not _hold(extents, layout):
        raise DataLoss("the extents do not hold a chunk of this model", reason="extents")
    header = parse_header(extents[0][: layout.header_bytes].tobytes(), layout)
    if header.encoding != "raw":
        raise DataLoss("memory holds raw chunks only", reason="encoding")
    if header.chain_digest != digest or header.fingerprint != fingerprint(wanted.spec, kind, layer):
        raise DataLoss("the extents hold another chunk than the one asked for", reason="header")
    if header.exactness is not exactness:
        raise DataLoss(f"the extents hold a chunk that is {header.exactness}", reason="exactness")
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
