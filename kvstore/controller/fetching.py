"""Lookups and leases."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.catalog import Catalog, Namespace, Record, Walk
from kvstore.config import LimitSettings
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.values import ChainQuery, FetchResult, LookupResult, Resident, Tail
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock
from kvstore.spec import Tier
from kvstore.telemetry import Counters


@dataclass(eq=False, slots=True)
class Lease:
    """A session's promise-holder: the records stay where they are until it is released or revoked."""

    lease_id: int
    session: Session
    records: tuple[Record, ...]
    byte_count: int
    born_s: float


def parts_of(catalog: Catalog, query: ChainQuery) -> list[Namespace]:
    """The namespaces a query's chunks must be in. Raises InvalidRequest for an unknown model or layer."""
    model = catalog.model(query.fingerprint)
    layers: list[int | None] = [] if query.hidden_only else [None]
    layers.extend(query.hidden_layers)
    if not layers:
        raise InvalidRequest("hidden_only without hidden_layers asks for nothing")
    if len(set(layers)) != len(layers):
        raise InvalidRequest("hidden_layers names a layer twice")
    return [model.namespace(layer, query.exactness) for layer in layers]


class Fetching:
    """Answers what is resident, and holds it while somebody copies."""

    def __init__(
        self,
        catalog: Catalog,
        policy: EvictionPolicy[Record],
        sessions: Sessions,
        limits: LimitSettings,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._catalog = catalog
        self._policy = policy
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self.leased_bytes = 0

    def lookup(self, query: ChainQuery) -> LookupResult:
        """Pure: no lease, no recency."""
        parts = parts_of(self._catalog, query)
        walk = self._catalog.walk(parts, query.digests)
        self._counters.add("lookup_calls")
        self._counters.add("lookup_hit_chunks", walk.hit_count)
        self._counters.add("lookup_miss_chunks", len(query.digests) - walk.hit_count)
        return LookupResult(walk.hit_count, walk.runs, self._tails(parts, query, walk))

    def fetch(self, session: Session, query: ChainQuery) -> FetchResult:
        """The resident prefix under a lease. Raises Exhausted past limits.leased_bytes_max or lease_count_max."""
        parts = parts_of(self._catalog, query)
        walk = self._catalog.walk(parts, query.digests)
        self._counters.add("fetch_calls")
        self._counters.add("fetch_miss_chunks", len(query.digests) - walk.hit_count)
        tails = self._tails(parts, query, walk)
        if not walk.hit_count:
            return FetchResult(0, 0, Tier.NONE, walk.reason, (), tails)
        chains = [[part.index[digest] for digest in query.digests[: walk.hit_count]] for part in parts]
        lease = self._lease(session, tuple(record for chain in chains for record in chain))
        for chain in chains:
            self._policy.used(chain)
        self._counters.add("fetch_hit_chunks", walk.hit_count)
        self._counters.add("fetch_bytes", lease.byte_count)
        chunks = tuple(
            Resident(index, part, record.token_count, record.placement)
            for part, chain in enumerate(chains)
            for index, record in enumerate(chain)
        )
        return FetchResult(lease.lease_id, walk.hit_count, Tier.DRAM, walk.reason, chunks, tails)

    def _tails(self, parts: list[Namespace], query: ChainQuery, walk: Walk) -> tuple[Tail, ...]:
        parent = query.digests[walk.hit_count - 1] if walk.hit_count else ROOT_DIGEST
        return tuple(Tail(record.token_count, record.digest) for record in self._catalog.tails(parts, parent))

    def _lease(self, session: Session, records: tuple[Record, ...]) -> Lease:
        byte_count = sum(record.placement.byte_count for record in records)
        if session.leased_bytes + byte_count > self._limits.leased_bytes_max:
            raise Exhausted(
                f"this session would lease {session.leased_bytes + byte_count} bytes: release some, or raise "
                f"limits.leased_bytes_max ({self._limits.leased_bytes_max})"
            )
        if len(session.leases) >= self._limits.lease_count_max:
            raise Exhausted(f"this session holds {len(session.leases)} leases: raise limits.lease_count_max")
        lease = Lease(self._sessions.next_id(), session, records, byte_count, self._clock.monotonic())
        session.leases[lease.lease_id] = lease
        session.leased_bytes += byte_count
        self.leased_bytes += byte_count
        for record in records:
            record.lease_count += 1
        return lease

    def release(self, session: Session, lease_ids: list[int]) -> None:
        """Give leases back. Ids that are not this session's are ignored: released or revoked before."""
        for lease_id in lease_ids:
            lease = session.leases.pop(lease_id, None)
            if lease is not None:
                session.leased_bytes -= lease.byte_count
                self.leased_bytes -= lease.byte_count
                for record in lease.records:
                    record.lease_count -= 1

    def revoke_stale(self) -> bool:
        """Take back leases older than limits.lease_age_s_max. Their readers notice by the generation."""
        born_before = self._clock.monotonic() - self._limits.lease_age_s_max
        stale = [
            lease for session in self._sessions for lease in session.leases.values() if lease.born_s <= born_before
        ]
        for lease in stale:
            self.release(lease.session, [lease.lease_id])
            self._counters.add("leases_revoked")
        return bool(stale)
