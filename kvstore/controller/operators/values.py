"""Arguments and results of operators' requests. They are plain values; the wire's messages mirror them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.chunk import ChunkHeader
from kvstore.spec import Durability, Encoding, Exactness, MissReason, Provenance, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A selection of chunks: a chunk must meet every condition that is set. Without conditions every chunk is selected.

    ``model``: an id, its last part, or the first digits of a fingerprint. ``digest``: its first hexadecimal digits.
    ``tier``: the name of a tier that has a copy. ``older_than_s``: stored at least so long ago. Sizes are those of a
    chunk in memory; ``byte_count_max`` 0: any size. ``use_count_max``: used at most so often; None: any number.
    """

    model: str = ""
    digest: str = ""
    tier: str = ""
    older_than_s: int = 0
    byte_count_min: int = 0
    byte_count_max: int = 0
    use_count_max: int | None = None
    chain: tuple[bytes, ...] = ()
    """The digests of a prompt's chunks, one of which the chunk must have; empty: no condition."""


@dataclass(frozen=True, slots=True)
class CopyFacts:
    """One copy of a chunk. ``tier``: the tier's name in settings."""

    tier: str
    kind: Tier
    encoding: Encoding
    is_proven: bool
    is_shared: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEntry:
    """The catalog's knowledge of one chunk. ``fingerprint`` is its namespace's; ``e_layer`` -1: the chunk is no E;
    ``model_id`` empty and ``byte_count`` 0 while its model is not registered; ``stored_seconds`` (since 1970) 0: the
    chunk was here before this start, and the time was not noted."""

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
    """The chunks of one model in one tier. Sizes are as in memory."""

    chunk_count: int = 0
    byte_count: int = 0


@dataclass(slots=True)
class ModelTotal:
    """The selected chunks of one model; ``tiers``: those in each tier, by its name. ``profiles``: in words for what
    there is a profile of it."""

    fingerprint: bytes
    model_id: str
    chunk_count: int = 0
    byte_count: int = 0
    tiers: dict[str, TierTotal] = field(default_factory=dict)
    profiles: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ListPage:
    """Some of the selected chunks. The last page has no chunks, but the totals of all selected ones."""

    chunks: tuple[ChunkEntry, ...] = ()
    totals: tuple[ModelTotal, ...] = ()
    is_last: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkDetail:
    """One part of a chunk. ``header`` is that of the copy in ``header_tier``; None where it could not be read, and
    ``header_problem`` says why. ``ancestors``: digests, the parent's first; of ``ancestor_count`` only the nearest."""

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
    """The stored parts of a chunk. Without any, ``reason`` says why the chunk is not here, if that is known."""

    parts: tuple[ChunkDetail, ...]
    reason: MissReason = MissReason.NONE


@dataclass(frozen=True, slots=True)
class HotEntry:
    """A prefix that is fetched much; see ``HotPrefix``. ``tier``: the name of the fastest tier that has its last chunk;
    empty: no tier has it."""

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
    """The outcomes of a change: chunks, and their bytes as in memory, by a word for the outcome. ``done_count`` of
    ``total_count`` chunks were handled. ``problem`` says why some of the change was not done. ``refuses_stores``: of a
    drain of the service, that it takes no stores now."""

    total_count: int = 0
    done_count: int = 0
    problem: str = ""
    refuses_stores: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    byte_counts: dict[str, int] = field(default_factory=dict)

    def add(self, what: str, byte_count: int, count: int = 1) -> None:
        """Count ``count`` chunks of ``byte_count`` bytes together under the word ``what``."""
        if count:
            self.counts[what] = self.counts.get(what, 0) + count
            self.byte_counts[what] = self.byte_counts.get(what, 0) + byte_count


@dataclass(frozen=True, slots=True)
class ChangeNews:
    """A report of a change's progress. The change goes on counting in the same tally: read it at once."""

    tally: Tally
    is_last: bool = False
