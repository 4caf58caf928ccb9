"""Arguments and results of the controller. They are plain values; the wire's messages mirror them. Values that every
lookup makes are named tuples: making one takes a quarter of a dataclass's time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.arena import Placement
from kvstore.catalog import ChainRun
from kvstore.catalog.spaces import Model
from kvstore.controller.benefit import NOTHING, Saving, Served, ServedModel
from kvstore.movement import MeasuredTier
from kvstore.spec import Durability, Exactness, MissReason, ModelSpec, Provenance, StoreState, Tier
from kvstore.tiers import TierStatistics
from kvstore.tiers.hbm import PoolExtent


class ChainQuery(NamedTuple):
    """A chain of digests, root's child first, in a model's namespaces. The parts of a chunk are its attention cache
    (unless ``hidden_only``) and the E of each hidden layer; a chunk hits when all its parts are stored."""

    fingerprint: bytes
    digests: list[bytes]
    hidden_layers: tuple[int, ...] = ()
    exactness: Exactness = Exactness.EXACT
    hidden_only: bool = False
    layers: tuple[int, ...] = ()
    """For a fetch: the layers that its caller waits for, which are read first; empty: all."""
    provenance: Provenance = Provenance.IN_CONTEXT
    is_ahead: bool = False
    """True for a fetch whose bytes no engine reads: it spared none a prefill."""
    on_device: bool = False
    """True for a fetch into tensors on the device of the tenant's pool."""


class UsedChain(NamedTuple):
    """A chain that a client copied without a call; ``query.digests`` has only its last digest. It was fetched
    ``fetch_count`` times, which brought ``token_count`` tokens in sum; 0: the client does not say."""

    query: ChainQuery
    fetch_count: int = 0
    token_count: int = 0


class Tail(NamedTuple):
    """A partial chunk after the last hit: the client compares the digest with that of its own tokens."""

    token_count: int
    digest: bytes


class LookupResult(NamedTuple):
    """The result of a lookup. ``runs`` cover the whole chain; the first ``hit_count`` chunks are hits. ``tails``:
    partial chunks after them. ``tail_lengths``: bit n is set where such a partial chunk has n tokens; 0: ``tails`` are
    all. ``tail_found``: the position, from 1 on, of the first stored one among the partial chunks asked for; 0: none.
    ``ticket_s``: seconds that the ticket lasts."""

    hit_count: int
    runs: tuple[ChainRun, ...]
    tails: tuple[Tail, ...]
    tail_lengths: int = 0
    tail_found: int = 0
    ticket: bytes = b""
    ticket_s: float = 0.0


class NodePrefix(NamedTuple):
    """The number of leading chunks of a chain that a node has in ``tier`` or faster tiers. An empty ``node`` stands for
    a tier that all nodes share; then only that tier's chunks count."""

    node: str
    tier: Tier
    chunk_count: int


class Located(NamedTuple):
    """The places of chains: for each chain, prefixes on this node (certain), on other nodes and in shared tiers
    (hints). ``node``: this node's name. ``reason``: why other nodes are left out, or may have more; empty: all
    is known of them. ``unknown``: the shared tiers that may have more, because they were not asked, or did not answer
    for all chunks."""

    node: str
    chains: list[list[NodePrefix]]
    reason: str
    unknown: tuple[Tier, ...]


class ArrivingChunk(Protocol):
    """A chunk on its way to memory, from another tier or from its writers."""

    @property
    def landed(self) -> int:
        """A bitmap of the slabs that can be read."""

    @property
    def slab_count(self) -> int: ...

    @property
    def lost(self) -> MissReason:
        """The reason why no more slabs will come; NONE while they may."""

    @property
    def is_provisional(self) -> bool:
        """True while its store is not committed: readers may have to discard the slabs that they read."""

    @property
    def has_landed(self) -> bool:
        """True when all slabs can be read, and are final."""

    @property
    def listeners(self) -> dict[asyncio.Event, None]:
        """Events that are set whenever one of the above changes, in the order in which they were added."""


@dataclass(frozen=True, slots=True)
class Resident:
    """One part of a fetched chunk: its chain index, part number, token count, and place in memory."""

    chain_index: int
    part: int
    token_count: int
    placement: Placement
    loading: ArrivingChunk | None = None
    """The load under way; None when the part is in memory."""
    on_device: PoolExtent | None = None
    """The place of another copy, on the device of the pool; None where there is none, or it was not asked for."""


class Arrival(NamedTuple):
    """News of the chunk at ``position`` of a fetch's result: the slabs in the bitmap ``landed`` are in memory now.
    ``lost``: why no more will come; NONE while they may."""

    position: int
    landed: int
    slab_count: int
    lost: MissReason
    is_provisional: bool = False
    """Its store has not been committed yet."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The stored prefix, leased until released. ``lease_id`` 0: nothing hit, nothing leased. ``tier``: the slowest tier
    that chunks come from. ``reason``: why the chunk after the prefix is missing."""

    lease_id: int
    hit_count: int
    tier: Tier
    reason: MissReason
    chunks: tuple[Resident, ...]
    tails: tuple[Tail, ...]
    tail_lengths: int = 0
    is_joined: bool = False
    """True when some of the chunks come from a store in flight."""


@dataclass(frozen=True, slots=True)
class ReserveRequest:
    """A request for room for a chain. ``tail_token_count``: tokens of the last chunk; 0: it is full."""

    query: ChainQuery
    token_digests: list[bytes]
    tail_token_count: int = 0
    first_position: int = 0
    shards: int = 1
    replaces: list[bytes] | None = None
    """Digests of an opaque namespace whose chunks this store replaces."""
    durability: Durability = Durability.NONE
    """For a level beyond the node, the chunks are sent there at once."""


class Fill(NamedTuple):
    """A run of strips in staging, laid out there as in the chunk's body."""

    chunk: int
    strip_first: int
    strip_count: int
    staging_id: int
    staging_offset: int


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The result of a reserve or a commit: one state per (chunk, part). After a commit, ``committed_count`` leading
    chunks of the chain are stored. ``tail_lengths``: for wanted chunks (index in the chain, bitmap) the lengths of the
    partial chunks beside them."""

    reservation_id: int
    states: tuple[StoreState, ...]
    committed_count: int = 0
    durability: Durability = Durability.NONE
    refusal: str = ""
    rows: tuple[int, ...] = ()
    """The catalog's rows of the committed prefix."""
    ticket: bytes = b""
    """The ticket by which the writers of other shards join the store."""
    tail_lengths: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Settled:
    """The durability of a chain's stored prefix: its ``chunk_count`` chunks have reached ``durability`` on the node
    itself; ``reason`` says why it is not more. ``is_settled``: the outcome waited for will not change any more.
    ``missing``: the reason for each level that not all chunks have reached; beyond the node only whole chunks count."""

    chunk_count: int
    durability: Durability
    reason: str
    is_settled: bool
    missing: Mapping[Durability, str]


@dataclass(frozen=True, slots=True)
class ModelCount:
    """The chunks and bytes of one model, and the saving of its fetches."""

    model_id: str
    fingerprint: bytes
    chunk_count: int
    byte_count: int
    spec: ModelSpec
    served: ServedModel

    @staticmethod
    def of(model: Model, served: Served) -> ModelCount:
        """Return the model's counts of now."""
        spaces = model.namespaces.values()
        count, held = sum(len(each.index) for each in spaces), sum(each.byte_count for each in spaces)
        fetched = served.of(model.fingerprint)
        return ModelCount(model.spec.model_id, model.fingerprint, count, held, model.spec, fetched)


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of one tenant's counts, sizes and rates."""

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
    """The reasons why tiers are not in use or take nothing; empty when all is well."""
    counters: dict[str, int]
    rates: tuple[MeasuredTier, ...] = ()
    """The rates at which the tiers below memory are read."""
    forgotten: Saving = NOTHING
    """The saving of models that are not among ``models`` any more: sums over all models never shrink."""
