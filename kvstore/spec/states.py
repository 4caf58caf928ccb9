"""Names of a chunk's states, tiers, encodings and durabilities. The numbers equal the wire contract's; a test checks
that."""

from __future__ import annotations

from enum import IntEnum


class ChunkState(IntEnum):
    """The result of a lookup for one chunk."""

    HIT = 1
    PENDING = 2
    MISS = 3


class MissReason(IntEnum):
    """The reason why a chunk is missing. NONE: it is not missing."""

    NONE = 0
    COLD = 1
    EVICTED = 2
    STALE = 3
    CORRUPT = 4
    OVERLOADED = 5
    UNAVAILABLE = 6

    @classmethod
    def _missing_(cls, value: object) -> MissReason | None:
        """Map a number that only a later release knows to UNAVAILABLE, as ``Tier`` does to NONE."""
        return cls.UNAVAILABLE if isinstance(value, int) else None


class Tier(IntEnum):
    """The kinds of tier in which a chunk can lie."""

    NONE = 0
    HBM = 1
    DRAM = 2
    NVME = 3
    S3 = 4
    REDIS = 5

    @classmethod
    def _missing_(cls, value: object) -> Tier | None:
        """Map a number that only a later release knows to NONE, so that its sidecar's replies can still be read."""
        return cls.NONE if isinstance(value, int) else None


SPEED = (Tier.HBM, Tier.DRAM, Tier.NVME, Tier.REDIS, Tier.S3)
"""All kinds of tier, the fastest first."""


class EventKind(IntEnum):
    """The kinds of event of a chunk. GAP: events were lost because their reader was too slow."""

    NONE = 0
    STORED = 1
    REMOVED = 2
    MOVED = 3
    GAP = 4

    @classmethod
    def _missing_(cls, value: object) -> EventKind | None:
        """Return NONE for a number that only a later release knows, as ``Tier`` does."""
        return cls.NONE if isinstance(value, int) else None


class Encoding(IntEnum):
    """The encoding of a residency's strips."""

    NONE = 0
    RAW = 1
    LZ4 = 2

    @classmethod
    def _missing_(cls, value: object) -> Encoding | None:
        """Return NONE for a number that only a later release knows, as ``Tier`` does."""
        return cls.NONE if isinstance(value, int) else None


def encoding_of(word: str) -> Encoding:
    """Return the encoding that a setting names. ``word``: one of ``ENCODING_SETTINGS``."""
    return Encoding.LZ4 if word == "lz4" else Encoding.RAW


ENCODING_SETTINGS = ("raw", "lz4")
SHARED_ENCODING_SETTINGS = (*ENCODING_SETTINGS, "auto")
"""A shared tier's encodings; ``auto`` chooses per model."""
ENVELOPES = ("none", "mac", "aead")
"""The envelopes that prove a copy outside memory to be ours: their names in settings. An index here is the number in a
header."""


class StoreState(IntEnum):
    """The state of one chunk of a reservation."""

    WANTED = 1
    PRESENT = 2
    PENDING = 3
    REFUSED = 4
    COMMITTED = 5
    ABORTED = 6


class Durability(IntEnum):
    """The failures that a stored chunk survives. NONE: it was not stored. MEMORY: it survives only its client."""

    NONE = 0
    MEMORY = 1
    LOCAL = 2
    SHARED = 3
    OBJECT = 4


LEVELS = tuple(level for level in Durability if level)
"""The levels that a store can reach. They are a set, not an order. SHARED: other nodes could read the chunk at the time
of the answer, with no promise for later. OBJECT: the whole chain is in an object store, its ancestors too."""
