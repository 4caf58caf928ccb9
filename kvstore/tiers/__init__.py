"""Where copies of chunks lie: memory, a device, Redis, S3. A tier stores whole chunks and gives back runs of
their slabs; it knows no policy and records no telemetry.

``contract`` says what tiers promise: ``LocalTier`` those whose room is ours, ``SharedTier`` those of an engine that
other nodes use, too. One conformance suite for each holds its tiers, wrappers and fakes to it. Bytes that leave a tier
were checked against the chunk's header (``contract.check_header`` and ``kvstore.chunk``) before anybody may see them.

- ``dram``  extents of the arena
- ``nvme``  region files on a device
- ``redis``  hashes in a server that other nodes use, too
- ``s3``  objects in a bucket that outlives the nodes
"""

from kvstore.tiers.contract import (
    NOTHING,
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
    "NOTHING",
    "Buffer",
    "ChunkName",
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
