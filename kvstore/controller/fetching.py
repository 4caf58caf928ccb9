"""Lookups and leases."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.catalog import Catalog, Namespace, Walk, absent_runs, joined_runs
from kvstore.config import LimitSettings
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.tickets import Tickets
from kvstore.controller.values import Arrival, ChainQuery, FetchResult, LookupResult, Resident, Tail
from kvstore.errors import DataLoss, Exhausted, InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.movement import Loading, Movement
from kvstore.seams import Clock, Pauses
from kvstore.spec import MissReason, Tier
from kvstore.telemetry import Counters

STEP_CHUNKS = 4096
"""How many of a chain's chunks, times their parts, are walked between two pauses."""


@dataclass(eq=False, slots=True)
class Lease:
    """A session's promise-holder: the chunks stay where they are until it is released or revoked."""

    lease_id: int
    session: Session
    rows: tuple[int, ...]
    byte_count: int
    born_s: float


async def arrivals_of(result: FetchResult, timeout_s: float) -> AsyncIterator[list[Arrival]]:
    """What lands of a fetch's cold chunks, in batches, until all of it did or was lost. What did not land within
    ``timeout_s`` counts as lost for this fetch."""
    waiting = {position: chunk.loading for position, chunk in enumerate(result.chunks) if chunk.loading}
    told = {position: (0, loading.is_provisional) for position, loading in waiting.items()}
    event = asyncio.Event()
    for loading in waiting.values():
        loading.listeners[event] = None
    until_s = asyncio.get_running_loop().time() + timeout_s
    try:
        while waiting:
            event.clear()
            news = [
                Arrival(position, loading.landed, loading.slab_count, loading.lost, loading.is_provisional)
                for position, loading in waiting.items()
                if (loading.landed, loading.is_provisional) != told[position] or loading.lost
            ]
            for each in news:
                told[each.position] = each.landed, each.is_provisional
                if each.lost or waiting[each.position].has_landed:
                    waiting.pop(each.position).listeners.pop(event, None)
            if news:
                yield news
            elif waiting:
                async with asyncio.timeout_at(until_s):  # not around a yield: it would cancel who listens
                    await event.wait()
    except TimeoutError:
        yield [
            Arrival(position, told[position][0], loading.slab_count, MissReason.UNAVAILABLE)
            for position, loading in waiting.items()
        ]
    finally:
        for loading in waiting.values():
            loading.listeners.pop(event, None)


def parts_of(catalog: Catalog, query: ChainQuery, *, for_store: bool = False) -> list[Namespace]:
    """The namespaces a query's chunks must be in; those that are not there are made for stores only. Raises
    InvalidRequest for an unknown model or layer; Exhausted past limits.namespace_count_max."""
    model = catalog.model(query.fingerprint)
    layers: list[int | None] = [] if query.hidden_only else [None]
    layers.extend(query.hidden_layers)
    if not layers:
        raise InvalidRequest("hidden_only without hidden_layers asks for nothing")
    if len(set(layers)) != len(layers):
        raise InvalidRequest("hidden_layers names a layer twice")
    of = model.namespace if for_store else model.seen
    return [of(layer, query.exactness, query.provenance) for layer in layers]


class Fetching:
    """Answers what is resident, and holds it while somebody copies."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        movement: Movement,
        sessions: Sessions,
        limits: LimitSettings,
        clock: Clock,
        counters: Counters,
        tickets: Tickets,
    ) -> None:
        self._catalog = catalog
        self._movement = movement
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._tickets = tickets
        self.leased_bytes = 0

    async def first_stored(self, query: ChainQuery, digests: Sequence[bytes], pauses: Pauses) -> int:
        """The number of the first of these chunks, from 1 on, that every part of the query holds by itself; 0: none."""
        parts = parts_of(self._catalog, query)
        step = max(1, STEP_CHUNKS // len(parts))
        for start in range(0, len(digests), step):
            found = self._catalog.first_of(parts, digests[start : start + step])
            if found:
                return start + found
            await pauses.between()
        return 0

    def lookup(self, query: ChainQuery, readers: int = 0) -> LookupResult:
        """What is stored of a chain. Pure: no lease, no recency; with ``readers`` the hits are held by a ticket."""
        parts = parts_of(self._catalog, query)
        walk = self._catalog.walk(parts, query.digests)
        self._counters.add("lookup_hit_chunks", walk.hit_count)
        self._counters.add("lookup_miss_chunks", len(query.digests) - walk.hit_count)
        tails, lengths = self._tails(parts, query, walk.hit_count)
        found = LookupResult(walk.hit_count, walk.runs, tails, lengths)
        if not readers or not walk.hit_count:
            return found
        held = query._replace(digests=query.digests[: walk.hit_count])
        rows = tuple(row for chain in walk.chains for row in chain)
        ticket = self._tickets.issue(held, rows, self._byte_count(walk), readers)
        return found._replace(ticket=ticket.ticket_id, ticket_s=self._limits.ticket_age_s_max)

    async def lookup_in_steps(self, query: ChainQuery, readers: int, pauses: Pauses) -> LookupResult:
        """As ``lookup``, of a chain that takes long to walk: others are answered in between. What left meanwhile is
        missed; what came may be."""
        parts = parts_of(self._catalog, query)
        step = max(1, STEP_CHUNKS // len(parts))
        hits, absent = 0, []
        for start in range(0, len(query.digests), step):
            digests = query.digests[start : start + step]
            if hits == start:
                found = self._catalog.walk(parts, digests).hit_count
                hits, digests = hits + found, digests[found:]
            absent += absent_runs(parts, digests)
            await pauses.between()
        prefix = self.lookup(query._replace(digests=query.digests[:hits]), readers)
        self._counters.add("lookup_miss_chunks", len(query.digests) - hits)
        return prefix._replace(runs=tuple(joined_runs((*prefix.runs, *absent))))

    def _byte_count(self, walk: Walk) -> int:
        table, numbered = self._catalog.table, self._catalog.spaces.numbered
        alike = Counter((table.spaces[row], table.token_counts[row]) for chain in walk.chains for row in chain)
        return sum(numbered[space].chunk_bytes(tokens) * count for (space, tokens), count in alike.items())

    def redeem(self, session: Session, ticket_id: bytes, layers: tuple[int, ...]) -> FetchResult:
        """Fetch what a ticket holds. Raises InvalidRequest for one that is not open, DataLoss when a part of it was
        lost after all, Exhausted when memory has no room for it now."""
        query = self._tickets.query(ticket_id)._replace(layers=layers)
        result = self.fetch(session, query)
        if result.hit_count == len(query.digests):
            self._tickets.redeemed(ticket_id)
            return result
        self.release(session, [result.lease_id])
        if result.reason in (MissReason.OVERLOADED, MissReason.UNAVAILABLE):
            raise Exhausted(f"the ticket's chunks cannot be brought into memory now: {result.reason.name}")
        raise DataLoss(f"a chunk of this ticket was lost: {result.reason.name}", reason=result.reason.name)

    def fetch(self, session: Session, query: ChainQuery) -> FetchResult:
        """The stored prefix under a lease; what memory does not have is on its way there.

        Raises Exhausted past limits.leased_bytes_max or lease_count_max.
        """
        parts = parts_of(self._catalog, query)
        walk = self._catalog.walk(parts, query.digests)
        self._counters.add("fetch_calls")
        chains, loadings, reason = self._bring_in(walk, frozenset(query.layers))
        count = len(chains[0])
        self._counters.add("fetch_miss_chunks", len(query.digests) - count)
        tails, lengths = self._tails(parts, query, count)
        if not count:
            return FetchResult(0, 0, Tier.NONE, reason, (), tails, lengths)
        chunks = tuple(self._residents(chains, loadings))
        lease = self.lease(session, tuple(row for chain in chains for row in chain), chunks)
        for chain in chains:
            self._movement.used(chain)
        self._counters.add("fetch_hit_chunks", count)
        self._counters.add("fetch_bytes", lease.byte_count)
        cold = any(chunk.loading for chunk in chunks)
        return FetchResult(lease.lease_id, count, Tier.NVME if cold else Tier.DRAM, reason, chunks, tails, lengths)

    def _bring_in(
        self, walk: Walk, layers: frozenset[int]
    ) -> tuple[list[list[int]], dict[int, Loading], MissReason]:  # fmt: skip
        """Start promoting what is cold. The chain ends before the first chunk that cannot be had now."""
        if all(map(self._movement.are_in_memory, walk.chains)):
            return walk.chains, {}, walk.reason
        keep = frozenset(row for chain in walk.chains for row in chain)
        order = [row for parts in zip(*walk.chains, strict=True) for row in parts]
        found, reason = self._movement.bring(order, keep, layers)
        whole = len(found) // len(walk.chains)
        loadings = {row: loading for row, loading in zip(order, found, strict=False) if loading is not None}
        return [chain[:whole] for chain in walk.chains], loadings, reason or walk.reason

    def _residents(self, chains: list[list[int]], loadings: dict[int, Loading]) -> Iterator[Resident]:
        table = self._catalog.table
        for part, chain in enumerate(chains):
            for index, row in enumerate(chain):
                loading = loadings.get(row)
                placement = loading.placement if loading else self._movement.placement(row)
                yield Resident(index, part, table.token_counts[row], placement, loading)

    def _tails(self, parts: list[Namespace], query: ChainQuery, count: int) -> tuple[tuple[Tail, ...], int]:
        """The partial chunks after the last hit, and the lengths of all where these are not all."""
        parent = query.digests[count - 1] if count else ROOT_DIGEST
        found, table = self._catalog.tails(parts, parent), self._catalog.table
        return tuple(Tail(table.token_counts[row], table.digests[row]) for row in found.rows), found.lengths

    def lease(self, session: Session, rows: tuple[int, ...], chunks: tuple[Resident, ...]) -> Lease:
        """Hold these rows. Raises Exhausted past limits.leased_bytes_max or lease_count_max."""
        byte_count = sum(chunk.placement.byte_count for chunk in chunks)
        if self._refusal(session, byte_count):
            self.revoke_stale([session])  # who went before the reply came knows of no lease to give back
        if refusal := self._refusal(session, byte_count):
            raise Exhausted(refusal)
        lease = Lease(self._sessions.next_id(), session, rows, byte_count, self._clock.monotonic())
        session.leases[lease.lease_id] = lease
        session.leased_bytes += byte_count
        self.leased_bytes += byte_count
        for row in rows:
            self._catalog.table.hold(row)
        return lease

    def _refusal(self, session: Session, byte_count: int) -> str:
        """Why this session may not lease so many bytes more; empty when it may."""
        if session.leased_bytes + byte_count > self._limits.leased_bytes_max:
            return (
                f"this session would lease {session.leased_bytes + byte_count} bytes: release some, or raise "
                f"limits.leased_bytes_max ({self._limits.leased_bytes_max})"
            )
        if len(session.leases) >= self._limits.lease_count_max:
            return f"this session holds {len(session.leases)} leases: raise limits.lease_count_max"
        return ""

    def release(self, session: Session, lease_ids: list[int]) -> None:
        """Give leases back. Ids that are not this session's are ignored: released or revoked before."""
        for lease_id in lease_ids:
            lease = session.leases.pop(lease_id, None)
            if lease is not None:
                session.leased_bytes -= lease.byte_count
                self.leased_bytes -= lease.byte_count
                for row in lease.rows:
                    self._catalog.unhold(row)

    def revoke_stale(self, sessions: Iterable[Session] | None = None) -> bool:
        """Take back leases older than limits.lease_age_s_max, of every session by default. Their readers notice by the
        generation."""
        born_before = self._clock.monotonic() - self._limits.lease_age_s_max
        of = self._sessions if sessions is None else sessions
        stale = [lease for session in of for lease in session.leases.values() if lease.born_s <= born_before]
        for lease in stale:
            self.release(lease.session, [lease.lease_id])
            self._counters.add("leases_revoked")
        return bool(stale)
