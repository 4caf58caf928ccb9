"""Checks of a chunk whose spec is unknown here. Its header gives the strips' places and checksums; the layer and head
of each strip, which seed its checksum, are found by trying. In an envelope each strip has a tag instead."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import xxhash

from kvstore.chunk.checksum import CHECKSUM_BYTES, seeds_of, strip_key
from kvstore.chunk.envelope import Trust, check_openable
from kvstore.chunk.header import _ENTRY, ChunkHeader, parse_header
from kvstore.chunk.layout import FIXED_HEADER_BYTES
from kvstore.errors import DataLoss
from kvstore.seams import EnvelopeRing
from kvstore.seams.memory import Bytes

LAYERS_BETWEEN_MAX = 256
"""Bound of the search: layers without a slab may lie between two slabs."""
_LENGTHS = struct.Struct("<12xIQ")


def object_lengths(data: bytes) -> tuple[int, int]:
    """Return (header bytes, body bytes) from the first 24 bytes of a header that is not checked yet. Raises DataLoss
    when ``data`` is shorter."""
    if len(data) < _LENGTHS.size:
        raise DataLoss("chunk header: truncated", reason="truncated")
    header_bytes, body_bytes = _LENGTHS.unpack_from(data)
    return header_bytes, body_bytes


def check_alone(data: Bytes) -> ChunkHeader:
    """Check every strip of a whole chunk, and return its header. Raises DataLoss. Cost: one hash of all bytes, and a
    few more of the first strip of each slab."""
    header = parse_header(data)
    key = strip_key(header.storage_key, header.write_id)
    layer, head = -1, -1
    for strip, expected in zip(_strips(data, len(header.checksums)), header.checksums, strict=True):
        layer, head = _place(key, layer, head, strip, bytes(expected))
    return header


def open_alone(data: Bytes, ring: EnvelopeRing) -> ChunkHeader | None:
    """Check the header and every strip of a whole chunk in an envelope, and return its plain header. None: the ring has
    no key that opens it, so nothing is checked. Raises DataLoss; InvalidRequest when the package that opens it is not
    installed. Cost: a hash or a decryption of all bytes."""
    check_openable(data, ring)
    header = Trust(ring=ring).read_header(data, None)
    if header is None:
        return None
    assert header.seal is not None
    for number, strip in enumerate(_strips(data, len(header.checksums))):
        # a copy, because the seal decrypts in place
        if not header.seal.opens(number, strip.copy(), header.checksums_of(number, number + 1)):
            raise DataLoss("a strip is not the one that was sealed", reason="tag")
    return header


def _strips(data: Bytes, strip_count: int) -> Iterator[Bytes]:
    """Give the stored strips of a whole chunk whose header is right, in order. Raises DataLoss when the chunk is not as
    long as its header says."""
    header_bytes, body_bytes = object_lengths(data[: _LENGTHS.size].tobytes())
    if data.size != header_bytes + body_bytes:
        raise DataLoss("the chunk is not as long as its header says", reason="truncated")
    stop = FIXED_HEADER_BYTES + strip_count * _ENTRY.itemsize
    table = np.frombuffer(data[FIXED_HEADER_BYTES:stop].tobytes(), _ENTRY)
    body = data[header_bytes:]
    for offset, length in zip(table["offset"].tolist(), table["length"].tolist(), strict=True):
        strip = body[offset : offset + length]
        if strip.size != length:
            raise DataLoss("a strip lies beyond the chunk's end", reason="truncated")
        yield strip


def _place(key: bytes, layer: int, head: int, strip: Bytes, expected: bytes) -> tuple[int, int]:
    """Return the layer and head of a strip, given those of the strip before it. Raises DataLoss when none fits."""
    assert len(expected) == CHECKSUM_BYTES
    following = [(layer, head + 1)] if layer >= 0 else []
    tried = following + [(layer + step, 0) for step in range(1, LAYERS_BETWEEN_MAX)]
    for at in range(0, len(tried), 4):
        few = tried[at : at + 4]
        layers, heads = (np.array(each, np.int32) for each in zip(*few, strict=True))
        for place, seed in zip(few, seeds_of(key, layers, heads), strict=True):
            if xxhash.xxh3_128_digest(strip.data, seed) == expected:
                return place
    raise DataLoss("a strip fails its check", reason="checksum")
