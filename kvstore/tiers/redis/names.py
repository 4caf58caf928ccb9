"""What lies where: the keys of a chunk, and how its body is cut into fields."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from kvstore.chunk import ChunkLayout, StoredStrips
from kvstore.seams.memory import Bytes

FIELD_BYTES_MAX = 4 << 20
"""A server does nothing else while it moves a field: one of 32 MiB keeps everybody waiting for 3 ms."""
HEADER_FIELD = b"h"
MARK_BYTES = 8


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Keys of chunks. The braces make all keys of a chunk one node's, where there is a cluster."""

    prefix: str

    def chunk(self, storage_key: bytes) -> bytes:
        """Where it is when it is whole."""
        return b"%b:v1:c:{%b}" % (self.prefix.encode(), storage_key.hex().encode())

    def claim(self, storage_key: bytes, tier: str) -> bytes:
        """Where a node says that it is about to write it to a tier."""
        return b"%b:v1:w:{%b}:%b" % (self.prefix.encode(), storage_key.hex().encode(), tier.encode())

    def unfinished(self, storage_key: bytes, attempt: bytes) -> bytes:
        """Where it is while it is written. Each attempt has a name of its own: what one left is removed later, and no
        other may lose its fields by that."""
        return b"%b:v1:t:{%b}:%b" % (self.prefix.encode(), storage_key.hex().encode(), attempt.hex().encode())


class FieldSpan(NamedTuple):
    """A field's bytes, counted from the start of the body."""

    start: int
    stop: int


class FieldRead(NamedTuple):
    """A field of ``byte_count`` bytes, of which ``skip`` are dropped, then ``take`` are wanted, and no more."""

    name: bytes
    byte_count: int
    skip: int
    take: int


def fields_of(layout: ChunkLayout, stored: StoredStrips | None = None) -> tuple[FieldSpan, ...]:
    """How the body is cut, which is raw, or encoded as ``stored`` says: runs of whole slabs as long as they fit a
    field; a larger slab has fields of its own."""
    return _raw_fields(layout) if stored is None else _cut_at(stored.slab_offsets[1:].tolist())


@lru_cache(maxsize=512)
def _raw_fields(layout: ChunkLayout) -> tuple[FieldSpan, ...]:
    return _cut_at([slab.offset + slab.byte_count for slab in layout.slabs])


def _cut_at(slab_stops: Sequence[int]) -> tuple[FieldSpan, ...]:
    spans: list[FieldSpan] = []
    start = stop = 0
    for slab_stop in slab_stops:
        if stop > start and slab_stop - start > FIELD_BYTES_MAX:
            spans.append(FieldSpan(start, stop))
            start = stop
        stop = slab_stop
        while stop - start > FIELD_BYTES_MAX:
            spans.append(FieldSpan(start, start + FIELD_BYTES_MAX))
            start += FIELD_BYTES_MAX
    if stop > start:
        spans.append(FieldSpan(start, stop))
    return tuple(spans)


def field_name(write_id: bytes, number: int, stored: StoredStrips | None = None) -> bytes:
    """Of one run. It names the write, and what an encoding made of it: another write's fields are others, and so are
    those of a node that encodes the same write in another way, or not at all."""
    made = b"" if stored is None else b"%08x." % crc32(stored.lengths.data)
    return b"%b.%b%d" % (write_id[:MARK_BYTES].hex().encode(), made, number)


def reads_of(
    layout: ChunkLayout, write_id: bytes, start: int, stop: int, stored: StoredStrips | None = None
) -> list[FieldRead]:
    """What to read to have the bytes ``start .. stop`` of the body."""
    return [
        FieldRead(
            field_name(write_id, number, stored), span.stop - span.start, max(start - span.start, 0),
            min(stop, span.stop) - max(start, span.start),
        )
        for number, span in enumerate(fields_of(layout, stored))
        if span.start < stop and span.stop > start
    ]  # fmt: skip


def cut(arrays: Sequence[Bytes], sizes: Sequence[int]) -> Iterator[list[Bytes]]:
    """The same memory, one part after the other, in parts of these sizes."""
    waiting, at = list(arrays), 0
    for size in sizes:
        part: list[Bytes] = []
        while size:
            piece = waiting[0][at : at + size]
            part.append(piece)
            size -= piece.size
            at += piece.size
            if at == waiting[0].size:
                waiting, at = waiting[1:], 0
        yield part
