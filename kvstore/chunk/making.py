"""The copy that a tier writes of a raw chunk: encoded where that saves enough, in an envelope where one is set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.chunk.checksum import strip_seeds
from kvstore.chunk.encoding import decode_slab, encode_chunk, slab_range, stored_run
from kvstore.chunk.envelope import Sealing, open_slabs, sealed
from kvstore.chunk.header import ChunkHeader
from kvstore.chunk.layout import ChunkLayout
from kvstore.chunk.strips import StripMemory, slab_runs
from kvstore.errors import DataLoss
from kvstore.seams import SystemClock
from kvstore.seams.memory import Bytes
from kvstore.spec import Encoding

_clock = SystemClock()
SAVES_MIN = 1 / 16
"""Least share of a chunk that encoding must save. Else the chunk is kept raw: readers need not decode it."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """The recipe of one copy: the raw chunk's header and layout, and the copy's encoding and sealing. It is sent to
    byte movers."""

    header: ChunkHeader
    layout: ChunkLayout
    encoding: Encoding
    sealing: Sealing | None

    def made(self, pieces: Sequence[Bytes]) -> tuple[ChunkHeader, list[Bytes]]:
        """Blocking. Make the copy; return its header without envelope, and its bytes: the header's, then the body's.
        ``pieces``: the raw chunk's, header first. Raises DataLoss when a strip that is encoded or sealed fails its
        checksum in the header."""
        layout, header, (head, *slabs) = self.layout, self.header, pieces
        if self.encoding is Encoding.RAW and self.sealing is None:
            return header, list(pieces)
        whole = range(len(layout.slabs))
        if self.encoding is Encoding.LZ4:
            encoded = encode_chunk(header, layout, pieces)
            if encoded.data.size <= layout.total_bytes * (1 - SAVES_MIN):
                head, body = encoded.data[: layout.header_bytes], encoded.data[layout.header_bytes :]
                return encoded.header, self._sealed(head, [(body, stored_run(encoded.header, layout, whole))])
        return header, self._sealed(head, slab_runs(layout, header.storage_key, header.write_id, whole, slabs))

    def _sealed(self, head: Bytes, runs: Sequence[StripMemory]) -> list[Bytes]:
        if self.sealing is None:
            return [head, *(data for data, _ in runs)]
        return sealed(self.sealing, head, runs)


class EncodingCost(NamedTuple):
    """lz4 on one chunk: stored bytes per raw byte, and the seconds of one thread for each raw byte."""

    ratio: float
    encode_s: float
    decode_s: float


def encoding_cost(header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> EncodingCost:
    """Blocking. Encode a raw chunk and decode it again, each once. Raises DataLoss when a strip fails its checksum."""
    begun_s = _clock.monotonic()
    encoded = encode_chunk(header, layout, pieces)
    encoded_s = _clock.monotonic()
    body = encoded.data[layout.header_bytes :]
    target = [np.empty(slab.byte_count, np.uint8) for slab in layout.slabs]
    if not decode_slabs(encoded.header, layout, range(len(layout.slabs)), body, target):
        raise DataLoss("a chunk that was just encoded does not decode")
    size = layout.total_bytes
    return EncodingCost(encoded.data.size / size, (encoded_s - begun_s) / size, (_clock.monotonic() - encoded_s) / size)


def decode_slabs(
    header: ChunkHeader, layout: ChunkLayout, slabs: range, stored: Bytes, target: Sequence[Bytes]
) -> bool:
    """Blocking. Check stored slabs one after the other, and write each raw to its array of ``target``. Slabs in an
    envelope are opened in place, in ``stored``. Return False when the bytes do not match the header."""
    if not open_slabs(header, layout, slabs, stored):
        return False
    seeds = strip_seeds(header.storage_key, layout, header.write_id)
    start = 0
    for slab, into in zip(slabs, target, strict=True):
        size = slab_range(header, layout, slab, slab + 1)[1]
        if not decode_slab(header, layout, slab, stored[start : start + size], into, seeds):
            return False
        start += size
    return True
