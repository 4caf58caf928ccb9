"""Strip checksums: XXH3-128 of the stored bytes, seeded with the chunk's identity and the strip's place.

The seed is the first 8 bytes of BLAKE3(storage key, layer, head, write id): right bytes at a wrong layer or head,
in another chunk, or of an earlier write of the same chunk fail the check. XXH3 detects accidents, not attacks;
where writers are not trusted, the envelope's MAC detects those.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
import xxhash
from blake3 import blake3
from kvstore_copies import keyed_words
from numpy.typing import NDArray

from kvstore.chunk.layout import ChunkLayout
from kvstore.seams.memory import Bytes

CHECKSUM_BYTES = 16
FEW_STRIPS = 8
"""For fewer seeds a call of compiled code costs more than it saves."""
Checksums = NDArray[np.uint8]


def strip_key(storage_key: bytes, write_id: bytes) -> bytes:
    """Return the 32-byte key from which the seeds of one write of a chunk are derived."""
    return blake3(b"kvstore/strips/1\0" + storage_key + write_id).digest()


def seeds_of(key: bytes, layers: NDArray[np.int32], heads: NDArray[np.int32]) -> list[int]:
    """Return one seed per (layer, head): a digest of the two, keyed with ``strip_key``. Cost without compiled code:
    about 1.5 us each."""
    if layers.size >= FEW_STRIPS:
        seeds = keyed_words(key, np.column_stack((layers, heads)).astype("<i4", copy=False))
        if seeds is not None:
            return seeds
    pairs = zip(layers.tolist(), heads.tolist(), strict=True)
    pack, unpack = struct.Struct("<ii").pack, struct.Struct("<Q").unpack
    return [unpack(blake3(pack(layer, head), key=key).digest(8))[0] for layer, head in pairs]


def strip_seeds(storage_key: bytes, layout: ChunkLayout, write_id: bytes) -> list[int]:
    """Return one seed per strip of the chunk."""
    return seeds_of(strip_key(storage_key, write_id), layout.strip_layers, layout.strip_heads)


def checksum_strips(
    slab: Bytes,
    layout: ChunkLayout,
    slab_index: int,
    seeds: list[int],
    first: int = 0,
    count: int | None = None,
) -> bytes:
    """Return the checksums of strips ``first .. first+count`` of a slab (numbered within it), 16 bytes each.

    ``slab`` holds the slab's bytes. The GIL is released while a strip is hashed.
    """
    spans, base = _spans(layout, slab_index), layout.slabs[slab_index].strip_first
    stop = len(spans) if count is None else first + count
    data, wanted = slab.data, zip(spans[first:stop], seeds[base + first : base + stop], strict=True)
    return b"".join([xxhash.xxh3_128_digest(data[start:end], seed) for (start, end), seed in wanted])


@lru_cache(maxsize=4096)
def _spans(layout: ChunkLayout, slab_index: int) -> tuple[tuple[int, int], ...]:
    """Return (start, end) of each strip in its slab."""
    entry = layout.slabs[slab_index]
    numbers = slice(entry.strip_first, entry.strip_first + entry.strip_count)
    starts = (layout.strip_offsets[numbers] - np.uint64(entry.offset)).tolist()
    return tuple(
        (start, start + size) for start, size in zip(starts, layout.strip_lengths[numbers].tolist(), strict=True)
    )


def verify_slab(
    slab: Bytes, layout: ChunkLayout, slab_index: int, seeds: list[int], checksums: Checksums,
    first: int = 0, count: int | None = None,
) -> bool:  # fmt: skip
    """True when the slab's strips have the checksums of the header. ``checksums`` [strips of the chunk, 16]."""
    start = layout.slabs[slab_index].strip_first + first
    found = checksum_strips(slab, layout, slab_index, seeds, first, count)
    return found == checksums[start : start + len(found) // CHECKSUM_BYTES].tobytes()
