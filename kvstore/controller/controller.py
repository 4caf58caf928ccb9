"""The controller: the whole service of one tenant."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvstore.arena import Region, Staging
from kvstore.catalog import Event, Watcher
from kvstore.controller.fetches import Fetches, Lookups, Tickets, arrivals_of
from kvstore.controller.locating import Locates
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.stores import Claims, Commits, Fills, Joins, Reservations
from kvstore.controller.values import (
    Arrival,
    ChainQuery,
    FetchResult,
    Fill,
    Located,
    LookupResult,
    ModelCount,
    ReserveRequest,
    Resident,
    Settled,
    Stats,
    StoreResult,
    UsedChain,
)
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, PermissionDenied, Unavailable
from kvstore.seams import Deadline, Mapping, Pauses
from kvstore.spec import LEVELS, Durability, ModelSpec
from kvstore.telemetry import TraceSpan

DRAIN_STEP_S, SWEEP_INTERVAL_S = 0.01, 1.0
_log = logging.getLogger("kvstore.controller")


class Controller:
    """Answers one tenant's requests. Every method runs on the event loop's thread.

    Methods raise only the errors of ``kvstore.errors``; a miss is never an error.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.tenant = parts.keys.tenant
        self._span = parts.tracing.span
        self.sessions = Sessions(parts.limits, parts.random, parts.memory, parts.ids)
        self.tickets = Tickets(parts)
        self.lookups = Lookups(parts, self.tickets)
        self.locates = Locates(parts)
        self.fetches = Fetches(parts, self.tickets)
        self.reservations = Reservations(parts)
        self.claims = Claims(parts, self.reservations)
        self.fills = Fills(parts, self.reservations)
        self.commits = Commits(parts, self.reservations, self.fills)
        self.joins = Joins(parts)
        self._leaving: dict[Session, None] = {}
        """Sessions that ended and still own something."""
        self._is_draining = False

    @property
    def counted(self) -> dict[str, str]:
        """The name of each counter, with its meaning."""
        return self.parts.counters.descriptions

    async def run(self) -> None:
        """Run the background work (movement, expiry) for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.parts.movement.run())
            group.create_task(self.sweep(SWEEP_INTERVAL_S))

    # ------------------------------------------------------------ sessions

    def open_session(self, *, is_operator: bool = False) -> Session:
        """Open a session. Raises Unavailable while the service stops; Exhausted past limits.session_count_max, of which
        an operator's session may be a few beyond."""
        if self._is_draining:
            raise Unavailable("the service is stopping")
        session = self.sessions.open(is_operator=is_operator)
        self.parts.counters.add("sessions_opened")
        return session

    def session(self, secret: bytes) -> Session:
        """The session that a call belongs to. Raises Unauthenticated: its client must connect again."""
        return self.sessions.find(secret)

    async def close_session(self, session: Session) -> None:
        """End a session and all it owns. Idempotent."""
        self.sessions.forget(session)
        self._leaving[session] = None
        for watcher in list(session.watchers):
            self.unwatch(session, watcher)
        self.parts.leases.release(session, self.parts.leases.of(session))
        deadline = self.deadline()
        for reservation in self.reservations.of(session):
            try:
                await self.reservations.abandon(reservation, deadline)
            except DeadlineExceeded as error:  # byte movers still use its memory and the session's staging
                _log.error("a store of an ended session stays", extra={"reason": error.message})
        if self.reservations.of(session):
            return
        for staging_id in list(session.stagings):
            self.close_staging(session, staging_id)
        self._leaving.pop(session, None)

    async def close_sessions(self) -> None:
        """End all sessions."""
        for session in self.sessions:
            await self.close_session(session)

    def create_staging(self, session: Session, byte_count: int) -> Staging:
        """Make memory that the session may write. Raises Exhausted past a limit, naming it."""
        return self.sessions.create_staging(session, byte_count)

    def close_staging(self, session: Session, staging_id: int) -> None:
        """Free staging. The session promises that no fill from it is under way; raises InvalidRequest when one is."""
        if self.reservations.are_moving(session):
            raise InvalidRequest("staging is being read: close it after its commit")
        staging = session.stagings.pop(staging_id, None)
        if staging is not None:
            staging.mapping.close()

    @contextmanager
    def stream(self, session: Session) -> Iterator[None]:
        """Count a stream of a session while it is open. Raises Exhausted past limits.stream_count_max."""
        most = self.parts.limits.stream_count_max
        if session.stream_count >= most:
            raise Exhausted(f"this session has {most} streams open: raise limits.stream_count_max")
        session.stream_count += 1
        try:
            yield
        finally:
            session.stream_count -= 1

    # ------------------------------------------------------------ what clients map

    def regions(self) -> Sequence[Region]:
        """The memory of all chunks, which clients map read-only."""
        return self.parts.arena.regions

    def generations(self) -> Mapping:
        """A number per chunk in memory, which changes before the chunk's bytes change."""
        return self.parts.arena.generations

    def presence(self) -> Mapping:
        """The presence table, in which clients look chunks up without a call."""
        return self.parts.catalog.presence.mapping

    # ------------------------------------------------------------ requests

    @property
    def token_count_max(self) -> int:
        return self.parts.limits.token_count_max

    def deadline(self, remaining_s: float | None = None) -> Deadline:
        """The deadline of a request that comes now: ``remaining_s`` if given, and controller.deadline_s at most."""
        return self.parts.deadline(remaining_s)

    def begin_long_work(self) -> Pauses:
        """Begin work on a long list. The pauses let other requests be answered between its items."""
        return self.parts.long_work.begin()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of this tenant."""
        self.parts.counters.add(name, amount)

    def register_model(self, spec: ModelSpec) -> bytes:
        """Register a model. Return the fingerprint that names it in every later call."""
        return self.parts.catalog.register(spec).fingerprint

    async def lookup_wide(self, query: ChainQuery, readers: int = 0, deadline: Deadline | None = None) -> LookupResult:
        """Return how far the node has a chain, and how far shared tiers say that they have its rest. With ``readers`` a
        ticket holds the hits for so many fetches."""
        with self._span("kvstore.lookup", asked_chunks=len(query.digests)) as span:
            self._check(query)
            self.parts.counters.add("lookup_calls")
            found = await self.lookups.lookup_wide(query, readers, deadline or self.deadline())
            span.note(hit_chunks=found.hit_count)
            return found

    async def lookup_segments(
        self, queries: Sequence[ChainQuery], deadline: Deadline | None = None
    ) -> list[LookupResult]:
        """Look each chain up by itself, as ``lookup_wide``. Raises Exhausted when all together are too long."""
        asked = sum(len(query.digests) for query in queries)
        with self._span("kvstore.lookup_segments", segments=len(queries), asked_chunks=asked) as span:
            self._check(*queries)
            found = await self.lookups.segments(queries, deadline or self.deadline())
            span.note(hit_chunks=sum(each.hit_count for each in found))
            return found

    async def locate(self, queries: Sequence[ChainQuery], deadline: Deadline | None = None) -> Located:
        """Return the nodes and tiers that have each chain's prefix. Moves and holds nothing."""
        self._check(*queries)
        return await self.locates.locate(queries, deadline or self.deadline())

    async def first_stored(self, query: ChainQuery, digests: Sequence[bytes]) -> int:
        """See ``Lookups.first_stored``."""
        return await self.lookups.first_stored(query, digests, self.parts.long_work.begin())

    async def fetch_wide(self, session: Session, query: ChainQuery, deadline: Deadline | None = None) -> FetchResult:
        """Lease the prefix that the node has, and bring in the chunks after it that shared tiers have."""
        with self._span("kvstore.fetch", asked_chunks=len(query.digests)) as span:
            self._check(query)
            return self._noted(span, await self.fetches.fetch_wide(session, query, deadline or self.deadline()))

    async def redeem(
        self, session: Session, ticket_id: bytes, layers: tuple[int, ...] = (), hidden_layers: tuple[int, ...] = (),
        deadline: Deadline | None = None, *, on_device: bool = False,
    ) -> FetchResult:  # fmt: skip
        """Fetch by the ticket of a held prefix, or by that of a store in flight."""
        until = deadline or self.deadline()
        with self._span("kvstore.redeem") as span:
            if (reservation := self.reservations.by_ticket(ticket_id)) is not None:
                return self._noted(span, self.joins.fetch(session, reservation, frozenset(layers), hidden_layers))
            return self._noted(span, await self.fetches.redeem(session, ticket_id, layers, until, on_device=on_device))

    def arrivals(self, result: FetchResult, deadline: Deadline | None = None) -> AsyncIterator[list[Arrival]]:
        """Give the fetch's chunks as they land, until the deadline; of a joined store, as long as that may take."""
        until = deadline or self.deadline()
        return arrivals_of(result, until.later(self.parts.limits.reservation_age_s_max) if result.is_joined else until)

    def used(self, queries: Iterable[UsedChain]) -> None:
        """See ``Fetches.used``."""
        self.fetches.used(queries)

    def watch(self, session: Session, tenant: str) -> Watcher:
        """Watch events from now on, until ``unwatch`` or the session's end. Raises PermissionDenied for another
        tenant's name; Exhausted past limits.watcher_count_max."""
        if tenant not in ("", self.tenant):
            raise PermissionDenied(f"this session is of tenant {self.tenant!r}: watch that, or name none")
        watcher = self.watch_all()
        session.watchers.add(watcher)
        return watcher

    def watch_all(self) -> Watcher:
        """Watch events from now on, for no session, until the watcher is closed. Raises Exhausted as ``watch``."""
        limits = self.parts.limits
        return self.parts.catalog.spaces.events.watch(limits.watch_event_count_max, limits.watcher_count_max)

    @property
    def event_sequence(self) -> int:
        """The number of the last event."""
        return self.parts.catalog.spaces.events.sequence

    def stored(self, batch_count: int) -> Iterator[list[Event]]:
        """Give an event for every chunk that is visible now, in batches."""
        return self.parts.catalog.stored(batch_count)

    def unwatch(self, session: Session, watcher: Watcher) -> None:
        """End a watch. Idempotent."""
        session.watchers.discard(watcher)
        watcher.close()

    def release(self, session: Session, lease_ids: Iterable[int]) -> None:
        """Give leases back. Ids that are not this session's are ignored: they were released or revoked before."""
        self.parts.leases.release(session, lease_ids)

    def places(self, ticket: bytes) -> tuple[Resident, ...]:
        """See ``Fetches.places``."""
        return self.fetches.places(ticket)

    def copied(self, ticket: bytes) -> None:
        """See ``Fetches.copied``."""
        self.fetches.copied(ticket)

    def release_ticket(self, ticket: bytes) -> None:
        """End a ticket. An unknown ticket is no error: it ended before."""
        self.tickets.release(ticket)

    async def reserve(self, session: Session, request: ReserveRequest, deadline: Deadline | None = None) -> StoreResult:
        """Claim the chunks of a chain for a store. Raises Unavailable while the service is stopping; InvalidRequest for
        a durability level that no tier gives here."""
        with self._span("kvstore.reserve", asked_chunks=len(request.query.digests)):
            if self._is_draining:
                raise Unavailable("the service is stopping")
            self._check(request.query)
            self.parts.movement.levels.check(request.durability)
            return await self.claims.reserve(session, request, deadline or self.deadline())

    def join(
        self, session: Session, ticket: bytes, fingerprint: bytes, durability: Durability = Durability.NONE
    ) -> StoreResult:
        """Write some shards of a store that another session began. Raises as ``reserve``."""
        self.parts.movement.levels.check(durability)
        return self.reservations.join(session, ticket, fingerprint, durability)

    async def begin_fill(
        self, session: Session, reservation_id: int, fills: Iterable[Fill], deadline: Deadline
    ) -> Sequence[Fill]:
        """Start the moves of a long list. Return its last fills, for the ``fill`` or ``commit`` that follows."""
        return await self.fills.begin(session, reservation_id, fills, deadline)

    async def fill(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], deadline: Deadline | None = None, *,
        at_once: bool = False,
    ) -> None:  # fmt: skip
        """Copy strips from staging into their chunks. ``at_once``: see ``Fills.fill``."""
        with self._span("kvstore.fill"):
            await self.fills.fill(session, reservation_id, fills, deadline or self.deadline(), at_once=at_once)

    async def commit(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], shard: int = 0,
        supersedes: Sequence[bytes] = (), deadline: Deadline | None = None,
    ) -> StoreResult:  # fmt: skip
        """Publish a store's complete chunks, and end the store. With write-through, wait for the device, too, as long
        as the answer comes before its caller gives up, who would take the store for failed."""
        until = deadline or self.deadline()
        with self._span("kvstore.commit") as span:
            result = await self.commits.commit(session, reservation_id, fills, shard, supersedes, deadline=until)
            if self.parts.is_write_through and result.rows:
                found = await self.parts.movement.levels.settle(result.rows, Durability.LOCAL, until.answerable_s)
                result = replace(result, durability=found.durability, refusal=result.refusal or found.reason)
            span.note(stored_chunks=result.committed_count, durability=result.durability.name)
            return result

    async def settle(self, query: ChainQuery, timeout_s: float, wanted: Durability = Durability.LOCAL) -> Settled:
        """Wait at most ``timeout_s`` seconds until the tier of the ``wanted`` level is done with the chain's stored
        prefix, and return how durable it is. For a level beyond the node, the prefix is sent there at once."""
        with self._span("kvstore.settle", wanted=wanted.name) as span:
            self._check(query)
            chains = self.lookups.stored(query)
            rows = [row for chain in chains for row in chain]
            if not rows:
                why = "nothing of it is stored any more"
                span.note(durability=Durability.NONE.name)
                return Settled(0, Durability.NONE, why, True, dict.fromkeys(LEVELS, why))
            found = await self.parts.movement.levels.settle(rows, wanted, timeout_s)
            span.note(durability=found.durability.name)
            return Settled(len(chains[0]), found.durability, found.reason, found.is_settled, found.missing)

    async def abort(self, session: Session, reservation_id: int, deadline: Deadline | None = None) -> None:
        """Drop a reservation. An unknown id is no error: it ended before."""
        await self.reservations.abort(session, reservation_id, deadline or self.deadline())

    def _noted(self, span: TraceSpan, found: FetchResult) -> FetchResult:
        if self.parts.tracing.is_on:  # it may have thousands of chunks
            cold = sum(chunk.loading is not None for chunk in found.chunks)
            span.note(hit_chunks=found.hit_count, cold_chunks=cold, tier=found.tier.name, reason=found.reason.name)
        return found

    def _check(self, *queries: ChainQuery) -> None:
        """Raises Exhausted past limits.token_count_max. The last chunk of a chain may be short: it does not count, but
        a chain counts as one token at least."""
        token_count = 0
        for query in queries:
            model = self.parts.catalog.models.get(query.fingerprint)
            token_count += max(1, (len(query.digests) - 1) * (model.spec.chunk_tokens if model else 1))
        if token_count > self.token_count_max:
            raise Exhausted(f"{token_count} tokens or more in one request: raise limits.token_count_max")

    # ------------------------------------------------------------ operators

    def stats(self) -> Stats:
        """Return a consistent snapshot."""
        parts, sessions = self.parts, list(self.sessions)
        arena, spaces, movement = parts.arena, parts.catalog.spaces, parts.movement
        return Stats(
            capacity_bytes=arena.capacity_bytes, prefaulted_bytes=arena.prefaulted_bytes, used_bytes=arena.used_bytes,
            leased_bytes=parts.leases.byte_count, pinned_bytes=parts.pins.byte_count, chunk_count=arena.chunk_count,
            reserved_bytes=self.reservations.reserved_bytes, region_count=len(arena.regions),
            reservation_count=sum(len(self.reservations.of(session)) for session in sessions),
            ticket_count=len(self.tickets), ticket_bytes=self.tickets.held_bytes, lease_count=len(parts.leases),
            session_count=len(sessions), stream_count=sum(session.stream_count for session in sessions),
            watcher_count=len(spaces.events.watchers), staging_bytes=self.sessions.staging_bytes,
            models=tuple(ModelCount.of(each, parts.served) for each in parts.catalog.models.values()),
            loading_bytes=movement.loads.loading_bytes, backlog_count=movement.backlog_count,
            tiers=movement.statistics(), tier_problem="; ".join(parts.problems),
            counters=parts.counters.snapshot(), rates=parts.meters.tiers, forgotten=parts.served.forgotten,
        )  # fmt: skip

    async def sweep(self, interval_s: float) -> None:
        """End reservations, tickets and pins past their time, and retry writes that a tier refused, for ever."""
        while True:
            await self.parts.clock.sleep(interval_s)
            self.reservations.expire()
            for session in [each for each in self._leaving if not self.reservations.are_moving(each)]:
                await self.close_session(session)
            self.tickets.expire()
            await self.parts.pins.sweep()
            await self.parts.movement.retry()

    async def drain(self, grace_s: float) -> None:
        """Take no new stores; let those in flight finish, at most ``grace_s`` seconds."""
        self._is_draining = True
        for watcher in list(self.parts.catalog.spaces.events.watchers):
            watcher.close()
        until_s = self.parts.clock.monotonic() + grace_s
        while self.parts.clock.monotonic() < until_s and any(map(self.reservations.of, self.sessions)):
            await self.parts.clock.sleep(DRAIN_STEP_S)
