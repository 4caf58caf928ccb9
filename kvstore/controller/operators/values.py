"""Operators' requests and replies as plain values; the wire's messages mirror them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.chunk import ChunkHeader
from kvstore.spec import Durability, Encoding, Exactness, MissReason, Provenance, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A selection of chunks: those that match every field that is set; without fields, all chunks.

    ``model``: an id, its last part, or the first digits of a fingerprint. ``digest``: the first hexadecimal digits.
    ``tier``: the name of one that has a copy. ``older_than_s``: stored for so long at least. Sizes are of a chunk as it
    lies in memory; ``byte_count_max`` 0: any. ``use_count_max``: used so often at most; None: however often.
    """

    model: str = ""
    digest: str = ""
    tier: str = ""
    older_than_s: int = 0
    byte_count_min: int = 0
    byte_count_max: int = 0
    use_count_max: int | None = None
    chain: tuple[bytes, ...] = ()
    """Of a prompt: the digests of its chunks; empty: whatever they are."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """One copy of a chunk. ``tier``: its name in settings."""

    tier: str
    kind: Tier
    encoding: Encoding
    is_proven: bool
    is_shared: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEntry:
    """The catalog's facts of one chunk. ``fingerprint`` is its namespace's; ``e_layer`` -1: it is no E;
    ``model_id`` empty and ``byte_count`` 0 while its model is not registered; ``stored_seconds`` 0: it was here before
    this start, and nobody noted since when."""

    digest: bytes
    parent: bytes
    fingerprint: bytes
    model_id: str
    e_layer: int
    provenance: Provenance
    exactness: Exactness
    token_count: int
    byte_count: int
    copies: tuple[CopyFacts, ...]
    use_count: int
    child_count: int
    is_held: bool
    stored_seconds: int
    is_pinned: bool


@dataclass(slots=True)
class TierTotal:
    """A model's chunks in one tier. Sizes are those in memory."""

    chunk_count: int = 0
    byte_count: int = 0


@dataclass(slots=True)
class ModelTotal:
    """The selected chunks of one model; ``tiers`` by name."""

    fingerprint: bytes
    model_id: str
    chunk_count: int = 0
    byte_count: int = 0
    tiers: dict[str, TierTotal] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ListPage:
    """Some of what was selected; in the last page, which has no chunks, the totals of all of it."""

    chunks: tuple[ChunkEntry, ...] = ()
    totals: tuple[ModelTotal, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkDetail:
    """One part of a chunk. ``header`` is that of the copy in ``header_tier``; None where none could be read, and
    ``header_problem`` says why. ``ancestors``: its parent first, as many as are told of ``ancestor_count``."""

    chunk: ChunkEntry
    header: ChunkHeader | None
    header_tier: str
    header_problem: str
    ancestors: tuple[bytes, ...]
    ancestor_count: int
    children: tuple[bytes, ...]
    lease_count: int
    hold_count: int
    levels: tuple[Durability, ...]


@dataclass(frozen=True, slots=True)
class ShownChunk:
    """Every part that is stored of a chunk; without one ``reason`` says why it is not here, where that is known."""

    parts: tuple[ChunkDetail, ...]
    reason: MissReason = MissReason.NONE


@dataclass(frozen=True, slots=True)
class HotEntry:
    """A prefix that is fetched much, as ``HotPrefix`` has it. ``tier``: the name of the fastest that has its last
    chunk; empty where none has."""

    above: int
    digest: bytes
    model_id: str
    fingerprint: bytes
    token_count: int
    heat: float
    own_heat: float
    tier: str


@dataclass(slots=True)
class Tally:
    """The outcomes of a change, by word: numbers of chunks, and their bytes as in memory; how many of ``total_count``
    were looked at; and why some of it was not done."""

    total_count: int
    done_count: int = 0
    problem: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    byte_counts: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, byte_count: int, count: int = 1) -> None:
        """So many became this."""
        self.counts[what] = self.counts.get(what, 0) + count
        self.byte_counts[what] = self.byte_counts.get(what, 0) + byte_count


@dataclass(frozen=True, slots=True)
class ChangeNews:
    """The progress of a change. The tally goes on being counted after it: it is to be read at once."""

    tally: Tally
    is_last: bool = False
