"""The stored format. A chunk is a header and slabs; a slab is one layer and a run of strips; a strip is the unit
of encoding and of checksum.

    header          n x 4 KiB: which chunk this is, and the checksum of every strip
    slab, layer 0   4 KiB-aligned; strips 64 B-aligned
      strip         KV: one kv head, K [tokens, k_dim] then V [tokens, v_dim]
                    MLA, E: 64 tokens, latent then rope part / hidden states
    slab, layer 1   ...

Arena and client see ``raw`` chunks, whose strips lie where the layout says. A tier may keep a chunk ``lz4``: the same
order and alignment, each strip shorter or as it was, and the header's table says where. ``encode_chunk`` and
``decode_slab`` convert between the two and restore every byte, header included; ``Making`` and ``StoredSlabs`` do so
for copies in envelopes, too.

Invariants: the layout follows from the spec, the kind and the token count alone; the bytes of one encoding are
the same on every tier; no encoding is larger than raw; a strip's checksum is seeded with the chunk's identity and
its place, so that right bytes in a wrong place fail. A copy outside memory may be in an envelope (``Trust``), which no
attacker alters unseen. The parser trusts nothing. This room does no I/O.
"""

from kvstore.chunk.alone import check_alone, object_lengths, open_alone
from kvstore.chunk.checksum import checksum_strips, strip_seeds, verify_slab
from kvstore.chunk.encoding import EncodedChunk, decode_slab, encode_chunk, raw_header, slab_range, stored_run
from kvstore.chunk.envelope import (
    ENVELOPE_READER,
    Sealer,
    Sealing,
    Trust,
    is_sealed,
    open_slabs,
    sealed,
    sealed_header_bytes,
    shown_header,
)
from kvstore.chunk.header import (
    ChunkHeader,
    is_newer_format,
    pack_header,
    parse_header,
    read_seat,
    write_mark,
    write_seat,
)
from kvstore.chunk.layout import FIXED_HEADER_BYTES, STRIP_ALIGNMENT, ChunkLayout, StoredStrips, layout_of
from kvstore.chunk.making import SAVES_MIN, EncodingCost, Making, decode_slabs, encoding_cost
from kvstore.chunk.parts import Part, PartPlace, part_places, slab_parts
from kvstore.chunk.seal import AEAD, MAC, check_available
from kvstore.chunk.sealed_file import open_file, seal_file
from kvstore.chunk.slabs import StoredSlabs
from kvstore.chunk.strips import StripMemory, StripRun, are_right, settle_runs, slab_runs, strip_run, wrong_slabs

__all__ = [
    "AEAD",
    "ENVELOPE_READER",
    "FIXED_HEADER_BYTES",
    "MAC",
    "SAVES_MIN",
    "STRIP_ALIGNMENT",
    "ChunkHeader",
    "ChunkLayout",
    "EncodedChunk",
    "EncodingCost",
    "Making",
    "Part",
    "PartPlace",
    "Sealer",
    "Sealing",
    "StoredSlabs",
    "StoredStrips",
    "StripMemory",
    "StripRun",
    "Trust",
    "are_right",
    "check_alone",
    "check_available",
    "checksum_strips",
    "decode_slab",
    "decode_slabs",
    "encode_chunk",
    "encoding_cost",
    "is_newer_format",
    "is_sealed",
    "layout_of",
    "object_lengths",
    "open_alone",
    "open_file",
    "open_slabs",
    "pack_header",
    "parse_header",
    "part_places",
    "raw_header",
    "read_seat",
    "seal_file",
    "sealed",
    "sealed_header_bytes",
    "settle_runs",
    "shown_header",
    "slab_parts",
    "slab_range",
    "slab_runs",
    "stored_run",
    "strip_run",
    "strip_seeds",
    "verify_slab",
    "write_mark",
    "write_seat",
    "wrong_slabs",
]
