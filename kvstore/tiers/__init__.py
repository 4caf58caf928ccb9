"""Where chunks lie beside each other's copies: memory, a device, later Redis and S3. A tier stores whole chunks and
gives back runs of their slabs; it knows no policy and records no telemetry.

``contract`` says what every tier promises; one conformance suite holds each of them, the wrappers and the fakes to
it. Bytes that leave a tier were checked against the chunk's header (``contract.check_header`` and
``kvstore.chunk.decode_slab``) before anybody may see them.
"""

from kvstore.tiers.arena import ArenaTier
from kvstore.tiers.contract import ChunkName, Found, Residency, StoredChunk, Tier, TierStatistics, check_header

__all__ = [
    "ArenaTier",
    "ChunkName",
    "Found",
    "Residency",
    "StoredChunk",
    "Tier",
    "TierStatistics",
    "check_header",
]
