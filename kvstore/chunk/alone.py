"""Checks of a chunk whose spec is unknown here. Its header gives the strips' places and checksums; the layer and head
of each strip, which seed its checksum, are found by trying."""

from __future__ import annotations

import struct

import numpy as np
import xxhash

from kvstore.chunk.checksum import CHECKSUM_BYTES, seeds_of, strip_key
from kvstore.chunk.header import _ENTRY, ChunkHeader, parse_header
from kvstore.chunk.layout import FIXED_HEADER_BYTES
from kvstore.errors import DataLoss
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
    header_bytes, body_bytes = object_lengths(data[: _LENGTHS.size].tobytes())
    if data.size != header_bytes + body_bytes:
        raise DataLoss("the chunk is not as long as its header says", reason="truncated")
    stop = FIXED_HEADER_BYTES + len(header.checksums) * _ENTRY.itemsize
    table = np.frombuffer(data[FIXED_HEADER_BYTES:stop].tobytes(), _ENTRY)
    body = data[header_bytes:]
    key = strip_key(header.storage_key, header.write_id)
    layer, head = -1, -1
    for offset, length, expected in zip(
        table["offset"].tolist(), table["length"].tolist(), table["checksum"], strict=True
    ):
        strip = body[offset : offset + length]
        if strip.size != length:
            raise DataLoss("a strip lies beyond the chunk's end", reason="truncated")
        layer, head = _place(key, layer, head, strip, bytes(expected))
    return header


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
