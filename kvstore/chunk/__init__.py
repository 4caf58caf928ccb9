"""The stored format. A chunk is a header and slabs; a slab is one layer and a run of strips; a strip is the unit
of encoding and of checksum.

    header          n x 4 KiB: which chunk this is, and the checksum of every strip
    slab, layer 0   4 KiB-aligned; strips 64 B-aligned
      strip         KV: one kv head, K [tokens, k_dim] then V [tokens, v_dim]
                    MLA, E: 64 tokens, latent then rope part / hidden states
    slab, layer 1   ...

Arena and client see ``raw`` chunks, whose strips lie where the layout says. A tier may keep a chunk ``lz4``: the same
order and alignment, each strip shorter or as it was, and the header's table says where. ``encode_chunk`` and
``decode_slab`` go between the two, back to the same bytes, header included.

Invariants: the layout follows from the spec, the kind and the token count alone; the bytes of one encoding are
the same on every tier; no encoding is larger than raw; a strip's checksum is seeded with the chunk's identity and
its place, so that right bytes in a wrong place fail. The parser trusts nothing. This room does no I/O.
"""

from kvstore.chunk.checksum import checksum_strips, strip_seeds, verify_slab
from kvstore.chunk.encoding import EncodedChunk, decode_slab, encode_chunk, raw_header, slab_range
from kvstore.chunk.header import ChunkHeader, pack_header, parse_header, write_mark
from kvstore.chunk.layout import ChunkLayout, layout_of
from kvstore.chunk.parts import Part, slab_parts
from kvstore.chunk.strips import Run, StripRun, are_right, slab_runs, strip_run

__all__ = [
    "ChunkHeader",
    "ChunkLayout",
    "EncodedChunk",
    "Part",
    "Run",
    "StripRun",
    "are_right",
    "checksum_strips",
    "decode_slab",
    "encode_chunk",
    "layout_of",
    "pack_header",
    "parse_header",
    "raw_header",
    "slab_parts",
    "slab_range",
    "slab_runs",
    "strip_run",
    "strip_seeds",
    "verify_slab",
    "write_mark",
]
