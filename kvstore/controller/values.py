"""The controller's arguments and results as plain values; the wire's messages mirror them. What each lookup
makes is a tuple: that takes a quarter of a dataclass's time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.arena import Placement
from kvstore.catalog import Run
from kvstore.catalog.spaces import Model
from kvstore.controller.benefit import Served, ServedModel
from kvstore.movement import MeasuredTier
from kvstore.spec import Durability, Exactness, MissReason, ModelSpec, Provenance, StoreState, Tier
from kvstore.tiers import TierStatistics


class ChainQuery(NamedTuple):
    """A query for chunks: a chain of digests, root's child first, in a model's namespaces. The parts of a chunk are its
    attention cache (unless ``hidden_only``) and the E of each hidden layer; it hits when all of them are there."""

    fingerprint: bytes
    digests: list[bytes]
    hidden_layers: tuple[int, ...] = ()
    exactness: Exactness = Exactness.EXACT
    hidden_only: bool = False
    layers: tuple[int, ...] = ()
    """Of a fetch: the layers its caller waits for, which come from the device first; empty: all."""
    provenance: Provenance = Provenance.IN_CONTEXT


class UsedChain(NamedTuple):
    """A chain that a client copied without a call: its last digest is all of ``query.digests``. It was fetched
    ``fetch_count`` times, which brought ``token_count`` tokens together; 0: the client does not say."""

    query: ChainQuery
    fetch_count: int = 0
    token_count: int = 0


class Tail(NamedTuple):
    """A partial chunk after the last hit: the client compares the digest with that of its own tokens."""

    token_count: int
    digest: bytes


class LookupResult(NamedTuple):
    """``runs`` cover the whole chain; the first ``hit_count`` chunks are resident. ``tail_lengths``: bit n is set where
    a partial chunk after them has n tokens; 0 while ``tails`` are all. ``tail_found``: which of the partial chunks that
    were asked for is the first that is stored, from 1 on."""

    hit_count: int
    runs: tuple[Run, ...]
    tails: tuple[Tail, ...]
    tail_lengths: int = 0
    tail_found: int = 0
    ticket: bytes = b""
    ticket_s: float = 0.0


class NodePrefix(NamedTuple):
    """The number of leading chunks of a chain that a node has in ``tier`` or faster ones. No node: a tier that all
    nodes share, and what it has by itself."""

    node: str
    tier: Tier
    chunk_count: int


class Located(NamedTuple):
    """The places of chains: of each, rows of this node (certain), of others and of shared tiers (hints). ``node`` is
    this one's name. ``reason``: why other nodes are not among them; empty: they are."""

    node: str
    chains: list[list[NodePrefix]]
    reason: str


class Arriving(Protocol):
    """A chunk on its way to memory, from another tier or from its writers."""

    @property
    def landed(self) -> int:
        """A bitmap of the slabs that can be read."""

    @property
    def slab_count(self) -> int: ...

    @property
    def lost(self) -> MissReason:
        """The reason why no more will come; NONE while it may."""

    @property
    def is_provisional(self) -> bool:
        """Its store has not been committed: what was read of it may turn out to be nothing."""

    @property
    def has_landed(self) -> bool:
        """All of it can be read, for good."""

    @property
    def listeners(self) -> dict[asyncio.Event, None]:
        """Set whenever one of the above changes, in the order in which they came."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One resident part of a chunk: chain index, part, tokens, and where it lies."""

    chain_index: int
    part: int
    token_count: int
    placement: Placement
    loading: Arriving | None = None
    """None when all of it is in memory."""


class Arrival(NamedTuple):
    """Of the chunk at ``position`` of a fetch's result, the slabs of the bitmap ``landed`` are in memory now; ``lost``
    says why no more will come."""

    position: int
    landed: int
    slab_count: int
    lost: MissReason
    is_provisional: bool = False
    """Its store has not been committed yet."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The resident prefix, leased until released. ``lease_id`` 0: nothing hit, nothing leased."""

    lease_id: int
    hit_count: int
    tier: Tier
    reason: MissReason
    chunks: tuple[Resident, ...]
    tails: tuple[Tail, ...]
    tail_lengths: int = 0
    is_joined: bool = False
    """Some of the chunks may come from a store in flight."""


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """Room for a chain. ``tail_token_count`` 0: the last chunk is full."""

    query: ChainQuery
    token_digests: list[bytes]
    tail_token_count: int = 0
    first_position: int = 0
    shards: int = 1
    replaces: list[bytes] | None = None
    """Digests, of an opaque namespace, whose chunks this store takes the place of."""
    durability: Durability = Durability.NONE
    """A level beyond the node: what is stored goes there at once."""


class Fill(NamedTuple):
    """A run of strips in staging, laid out as in the chunk's body from its first strip on."""

    chunk: int
    strip_first: int
    strip_count: int
    staging_id: int
    staging_offset: int


@dataclass(frozen=True, slots=True)
class StoreResult:
    """One state per (chunk, part); ``committed_count`` leading chunks of the chain are resident. ``tail_lengths``: of
    wanted chunks, by their place in the chain, which lengths the partial chunks beside them have."""

    reservation_id: int
    states: tuple[StoreState, ...]
    committed_count: int = 0
    durability: Durability = Durability.NONE
    refusal: str = ""
    rows: tuple[int, ...] = ()
    """The catalog's rows of the committed prefix."""
    ticket: bytes = b""
    """What the writers of the other shards join by."""
    tail_lengths: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The durability of a chain's stored prefix: ``chunk_count`` chunks have reached ``durability`` on the node itself;
    ``reason`` says why that is not more. ``is_settled``: what was waited for will not change any more. ``missing``: why
    of each level that all of them have not reached; of what lies beyond the node that counts whole chunks only."""

    chunk_count: int
    durability: Durability
    reason: str
    is_settled: bool
    missing: Mapping[Durability, str]


@dataclass(frozen=True, slots=True)
class ModelCount:
    """The memory that one model occupies, and the tokens fetched of it."""

    model_id: str
    fingerprint: bytes
    chunk_count: int
    byte_count: int
    spec: ModelSpec
    served: ServedModel

    @staticmethod
    def of(model: Model, served: Served) -> ModelCount:
        """As it is now."""
        spaces = model.namespaces.values()
        count, held = sum(len(each.index) for each in spaces), sum(each.byte_count for each in spaces)
        fetched = served.of(model.fingerprint)
        return ModelCount(model.spec.model_id, model.fingerprint, count, held, model.spec, fetched)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of what the service holds."""

    capacity_bytes: int
    prefaulted_bytes: int
    used_bytes: int
    leased_bytes: int
    pinned_bytes: int
    reserved_bytes: int
    region_count: int
    chunk_count: int
    session_count: int
    reservation_count: int
    lease_count: int
    ticket_count: int
    ticket_bytes: int
    stream_count: int
    watcher_count: int
    staging_bytes: int
    models: tuple[ModelCount, ...]
    loading_bytes: int
    backlog_count: int
    tiers: tuple[TierStatistics, ...]
    """Of every tier below memory, the fastest first."""
    tier_problem: str
    """Why a tier is not in use, or takes nothing; empty when all is well."""
    counters: dict[str, int]
    rates: tuple[MeasuredTier, ...] = ()
    """How fast the tiers below memory are read."""
