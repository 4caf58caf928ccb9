"""Makes the copy of a raw chunk that a tier writes: encoded where that is worth it, in an envelope where there is
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.chunk.checksum import strip_seeds
from kvstore.chunk.encoding import decode_slab, encode_chunk, slab_range, stored_run
from kvstore.chunk.envelope import Sealing, open_slabs, sealed
from kvstore.chunk.header import ChunkHeader
from kvstore.chunk.layout import ChunkLayout
from kvstore.chunk.strips import Run, slab_runs
from kvstore.seams.memory import Bytes
from kvstore.spec import Encoding

SAVES_MIN = 1 / 16
"""A chunk of which encoding saves less is kept raw: readers need not decode it."""


@dataclass(frozen=True, kw_only=True)
class Making:
    """Of one copy: the raw chunk's header and layout, and what is made of it. Crosses to byte movers."""

    header: ChunkHeader
    layout: ChunkLayout
    encoding: Encoding
    sealing: Sealing | None

    @property
    def is_plain(self) -> bool:
        """True when the copy is the raw chunk, byte for byte."""
        return self.encoding is Encoding.RAW and self.sealing is None

    def made(self, pieces: Sequence[Bytes]) -> tuple[ChunkHeader, list[Bytes]]:
        """Blocking. The header of the copy, without its envelope, and its bytes: the header's, then the body's.
        ``pieces`` are the raw chunk's, header first. Raises DataLoss where a strip is not the one that the header
        names."""
        layout, header, (head, *slabs) = self.layout, self.header, pieces
        whole = range(len(layout.slabs))
        if self.encoding is Encoding.LZ4:
            encoded = encode_chunk(header, layout, pieces)
            if encoded.data.size <= layout.total_bytes * (1 - SAVES_MIN):
                head, body = encoded.data[: layout.header_bytes], encoded.data[layout.header_bytes :]
                return encoded.header, self._sealed(head, [(body, stored_run(encoded.header, layout, whole))])
        return header, self._sealed(head, slab_runs(layout, header.storage_key, header.write_id, whole, slabs))

    def _sealed(self, head: Bytes, runs: Sequence[Run]) -> list[Bytes]:
        if self.sealing is None:
            return [head, *(data for data, _ in runs)]
        return sealed(self.sealing, head, runs)


def decode_slabs(
    header: ChunkHeader, layout: ChunkLayout, slabs: range, stored: Bytes, target: Sequence[Bytes]
) -> bool:
    """Blocking. Check slabs as they are stored in a copy, one after the other, and write them raw, each to its array of
    ``target``. What is in an envelope is opened in its place. False when anything is not as the header says."""
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
