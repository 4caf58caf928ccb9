"""The stored format. A chunk is a header and slabs; a slab is one layer and a run of strips; a strip is the unit
of encoding and of checksum.

    header          n x 4 KiB: which chunk this is, and the checksum of every strip
    slab, layer 0   4 KiB-aligned; strips 64 B-aligned
      strip         KV: one kv head, K [tokens, k_dim] then V [tokens, v_dim]
                    MLA, E: 64 tokens, latent then rope part / hidden states
    slab, layer 1   ...

Invariants: the layout follows from the spec, the kind and the token count alone; the bytes of one encoding are
the same on every tier; a strip's checksum is seeded with the chunk's identity and its place, so that right bytes
in a wrong place fail. The parser trusts nothing. This room does no I/O.
"""

from kvstore.chunk.checksum import checksum_strips, strip_seeds, verify_slab
from kvstore.chunk.header import ChunkHeader, pack_header, parse_header
from kvstore.chunk.layout import ChunkLayout, Slab, layout_of
from kvstore.chunk.parts import Part, slab_parts

__all__ = [
    "ChunkHeader",
    "ChunkLayout",
    "Part",
    "Slab",
    "checksum_strips",
    "layout_of",
    "pack_header",
    "parse_header",
    "slab_parts",
    "strip_seeds",
    "verify_slab",
]
