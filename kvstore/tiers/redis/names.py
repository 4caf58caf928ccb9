"""The keys of a chunk, and the fields that its body is cut into."""

from __future__ import annotations

from binascii import hexlify
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple
from zlib import crc32

from kvstore.chunk import ChunkLayout, StoredStrips

FIELD_BYTES_MAX = 4 << 20
"""A server does nothing else while it moves a field: a field of 32 MiB delays all other requests by 3 ms."""
HEADER_FIELD = b"h"
MARK_BYTES = 8
_start_of, _stop_of = attrgetter("start"), attrgetter("stop")


@dataclass(frozen=True, slots=True)
class ChunkKeys:
    """Keys of chunks. The braces place all keys of a chunk on one node of a cluster."""

    prefix: str

    def chunk(self, storage_key: bytes) -> bytes:
        """Return the key of a whole chunk."""
        return self.chunks((storage_key,))[0]

    def chunks(self, storage_keys: Iterable[bytes]) -> list[bytes]:
        """Return the key of each of these chunks."""
        key = b"%b:v1:c:{%%b}" % self.prefix.encode().replace(b"%", b"%%")
        return [key % each for each in map(hexlify, storage_keys)]

    def claim(self, storage_key: bytes, tier: str) -> bytes:
        """Return the key of the claim with which a node says that it is about to write the chunk to a tier."""
        return b"%b:v1:w:{%b}:%b" % (self.prefix.encode(), storage_key.hex().encode(), tier.encode())

    def unfinished(self, storage_key: bytes, attempt: bytes) -> bytes:
        """Return the key of a chunk while it is written. Each attempt has a key of its own: an abandoned attempt is
        removed later, and that must not remove another attempt's fields."""
        return b"%b:v1:t:{%b}:%b" % (self.prefix.encode(), storage_key.hex().encode(), attempt.hex().encode())


class FieldSpan(NamedTuple):
    """A field's bytes, counted from the start of the body."""

    start: int
    stop: int


class FieldRead(NamedTuple):
    """A field of ``byte_count`` bytes: ``skip`` bytes are dropped, the next ``take`` are wanted, the rest is
    dropped."""

    name: bytes
    byte_count: int
    skip: int
    take: int


def fields_of(layout: ChunkLayout, stored: StoredStrips | None = None) -> tuple[FieldSpan, ...]:
    """Return the cut of the body, which is raw, or encoded as ``stored`` says: each field is a run of whole slabs as
    long as they fit; a larger slab has fields of its own."""
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
    """Return the name of one run. It names the write and its encoding: fields of another write have other names, and so
    do those of a node that encodes the same write in another way, or not at all."""
    made = b"" if stored is None else b"%08x." % crc32(stored.lengths.data)
    return b"%b.%b%d" % (write_id[:MARK_BYTES].hex().encode(), made, number)


def reads_of(
    layout: ChunkLayout, write_id: bytes, start: int, stop: int, stored: StoredStrips | None = None
) -> list[FieldRead]:
    """Return the field reads that give the bytes ``start .. stop`` of the body."""
    spans = fields_of(layout, stored)
    first = bisect_right(spans, start, key=_stop_of)
    last = bisect_left(spans, stop, lo=first, key=_start_of)
    return [
        FieldRead(
            field_name(write_id, number, stored), span.stop - span.start, max(start - span.start, 0),
            min(stop, span.stop) - max(start, span.start),
        )
        for number, span in enumerate(spans[first:last], first)
    ]  # fmt: skip
