"""Tiers keep copies of chunks: in memory, on a device, in Redis, in S3. A tier stores whole chunks and gives back runs
of their slabs; it knows no policy and records no telemetry.

``contract`` says what tiers promise: ``LocalTier`` for tiers in room of our own, ``SharedTier`` for tiers in an engine
that other nodes use, too. One conformance suite for each tests its tiers, wrappers and fakes. Bytes that leave a tier
were checked against the chunk's header (``contract.check_header`` and ``kvstore.chunk``) before anybody may see them.

- ``dram``    extents of the arena
- ``nvme``    region files on a device
- ``redis``   hashes in a server that other nodes use, too
- ``s3``      objects in a bucket that outlives the nodes
- ``choice``  the encoding of copies in a shared tier, chosen per model
- ``pace``    the time that a tier may take, and the time that it keeps its callers waiting
"""

from kvstore.tiers.choice import EncodingFigures
from kvstore.tiers.contract import (
    IS_FULL,
    NOTHING,
    PART,
    Buffer,
    ChunkName,
    Evictor,
    IndexColumns,
    LocalTier,
    NotOurs,
    Recovered,
    Residency,
    SharedTier,
    SharedUse,
    StoredChunk,
    TierStatistics,
    UploadClaims,
    UploadState,
    WritePolicy,
    check_header,
)

__all__ = [
    "IS_FULL",
    "NOTHING",
    "PART",
    "Buffer",
    "ChunkName",
    "EncodingFigures",
    "Evictor",
    "IndexColumns",
    "LocalTier",
    "NotOurs",
    "Recovered",
    "Residency",
    "SharedTier",
    "SharedUse",
    "StoredChunk",
    "TierStatistics",
    "UploadClaims",
    "UploadState",
    "WritePolicy",
    "check_header",
]
