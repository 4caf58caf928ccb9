"""The names of a chunk's places and fates. The numbers are the wire contract's; a test holds them equal."""

from __future__ import annotations

from enum import IntEnum


class ChunkState(IntEnum):
    """A lookup's answer for one chunk."""

    HIT = 1
    PENDING = 2
    MISS = 3


class MissReason(IntEnum):
    """The reason why a chunk is not there. NONE: it is."""

    NONE = 0
    COLD = 1
    EVICTED = 2
    STALE = 3
    CORRUPT = 4
    OVERLOADED = 5
    UNAVAILABLE = 6


class Tier(IntEnum):
    """The tier in which a chunk lies."""

    NONE = 0
    HBM = 1
    DRAM = 2
    NVME = 3
    S3 = 4
    REDIS = 5

    @classmethod
    def _missing_(cls, value: object) -> Tier | None:
        """A number that only a later release knows: its sidecar's replies can still be read."""
        return cls.NONE if isinstance(value, int) else None


class EventKind(IntEnum):
    """The kind of an event of a chunk. GAP: events were lost, for their reader was too slow."""

    NONE = 0
    STORED = 1
    REMOVED = 2
    MOVED = 3
    GAP = 4


class Encoding(IntEnum):
    """The encoding of a residency's strips."""

    NONE = 0
    RAW = 1
    LZ4 = 2


def encoding_of(word: str) -> Encoding:
    """What a setting names: one of ``ENCODING_SETTINGS``."""
    return Encoding.LZ4 if word == "lz4" else Encoding.RAW


ENCODING_SETTINGS = ("raw", "lz4")
ENVELOPES = ("none", "mac", "aead")
"""What proves a copy outside memory to be ours, in settings, and by their numbers in its header."""


class StoreState(IntEnum):
    """The outcome of one chunk of a reservation."""

    WANTED = 1
    PRESENT = 2
    PENDING = 3
    REFUSED = 4
    COMMITTED = 5
    ABORTED = 6


class Durability(IntEnum):
    """The failures that a stored chunk survives, as a level. NONE: it was not stored; MEMORY: nothing but its
    client."""

    NONE = 0
    MEMORY = 1
    LOCAL = 2
    SHARED = 3
    OBJECT = 4


LEVELS = tuple(level for level in Durability if level)
"""What can be reached. They are a set, not an order: SHARED says that other nodes could read it when that was said, and
promises nothing for later; OBJECT that all of a chain is in an object store, its ancestors too."""
