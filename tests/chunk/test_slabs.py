"""Slabs of a stored copy come back raw, whatever the copy is, and no altered byte does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.chunk import AEAD, MAC, ChunkHeader, Making, StoredSlabs, Trust, slab_range
from kvstore.seams import EnvelopeKey, EnvelopeRing
from kvstore.seams.memory import Bytes
from kvstore.spec import Encoding
from tests.contracts.chunks import Chunk, chunk, layouts

RING = EnvelopeRing((EnvelopeKey.derived(b"new" * 20),))


def body_of(what: Chunk, header: ChunkHeader, data: Bytes) -> Bytes:
    start, byte_count = slab_range(header, what.layout, 0, len(what.layout.slabs))
    start += header.bytes_before(what.layout)
    return data[start : start + byte_count].copy()


def comes_right(what: Chunk, header: ChunkHeader, body: Bytes, target: Sequence[Bytes]) -> bool:
    """Read all slabs of a copy, as a tier does."""
    stored = StoredSlabs.of(header, what.layout, range(len(what.layout.slabs)), target)
    room, place = stored.room(), 0
    for each in room:
        np.copyto(each, body[place : place + each.size])
        place += each.size
    assert place == stored.byte_count == body.size
    return stored.are_right(room)


@pytest.mark.parametrize("kind", ["none", MAC, AEAD])
@pytest.mark.parametrize("encoding", [Encoding.RAW, Encoding.LZ4])
@pytest.mark.parametrize("name", sorted(layouts()))
def test_slabs_come_back_to_the_byte_or_not_at_all(name: str, encoding: Encoding, kind: str) -> None:
    what, trust = chunk(3, layouts()[name]), Trust(kind, RING)
    making = Making(header=what.header, layout=what.layout, encoding=encoding, sealing=trust.sealing())
    data = np.concatenate(making.made(what.pieces)[1])
    header = trust.read_header(data[: trust.header_bytes(what.layout)], what.layout)
    assert header is not None
    body = body_of(what, header, data)
    target = [np.full(slab.byte_count, 0xEE, np.uint8) for slab in what.layout.slabs]
    assert comes_right(what, header, body, target)
    assert all(np.array_equal(*each) for each in zip(target, what.pieces[1:], strict=True))
    assert comes_right(what, header, body, ())
    offsets = what.layout.strip_offsets if header.stored is None else header.stored.offsets
    body[int(offsets[-1])] ^= 1
    assert not comes_right(what, header, body, target)
    assert not comes_right(what, header, body, ())
