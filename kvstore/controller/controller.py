"""The controller: one tenant's service, whole."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from kvstore.arena import Arena, Staging
from kvstore.catalog import Catalog, Watcher
from kvstore.config import LimitSettings, PolicySettings
from kvstore.controller.claiming import Claiming
from kvstore.controller.fetching import STEP_CHUNKS, Fetching, arrivals_of, parts_of
from kvstore.controller.joining import Joining, has_filling
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.storing import Storing
from kvstore.controller.tickets import Tickets
from kvstore.controller.values import (
    Arrival,
    ChainQuery,
    FetchResult,
    Fill,
    LookupResult,
    ModelCount,
    ReserveRequest,
    Settled,
    Stats,
    StoreResult,
)
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, PermissionDenied, Unavailable
from kvstore.movement import Movement
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, FaultPoints, LongWork, Memory, Random, TenantKeys, Workers
from kvstore.spec import Durability, ModelSpec
from kvstore.telemetry import Counters
from kvstore.tiers.nvme import NvmeTier

DRAIN_STEP_S = 0.01
FILL_BATCH = 64
"""Fills whose copies are begun at once."""
SWEEP_INTERVAL_S = 1.0
_log = logging.getLogger("kvstore.controller")


class Controller:
    """Answers one tenant's requests. Every method runs on the event loop's thread.

    Raises: what ``kvstore.errors`` draws; a miss is never an error.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        policy: EvictionPolicy,
        limits: LimitSettings,
        clock: Clock,
        random: Random,
        memory: Memory,
        workers: Workers,
        keys: TenantKeys,
        faults: FaultPoints,
        counters: Counters,
        deadline_s: float = 10.0,
        policies: PolicySettings = PolicySettings(),  # noqa: B008 - frozen
        is_write_through: bool = False,
    ) -> None:
        self.arena = arena
        self.limits = limits
        self.counters = counters
        self.keys = keys
        self.deadline_s = deadline_s
        self._clock, self.long_work = clock, LongWork(clock)
        self._is_write_through = is_write_through
        self.catalog = Catalog(limits.model_count_max, memory, limits.namespace_count_max)
        self.sessions = Sessions(limits, random, memory)
        self.movement = Movement(
            arena=arena, catalog=self.catalog, policy=policy, keys=keys, clock=clock, random=random, workers=workers,
            faults=faults, counters=counters, policies=policies, revoke_stale=lambda: self.fetching.revoke_stale(),
        )  # fmt: skip
        self.tickets = Tickets(self.catalog, limits, clock, random, counters)
        self.fetching = Fetching(
            catalog=self.catalog, movement=self.movement, sessions=self.sessions, limits=limits, clock=clock,
            counters=counters, tickets=self.tickets,
        )  # fmt: skip
        self.claiming = Claiming(
            arena=arena, catalog=self.catalog, movement=self.movement, sessions=self.sessions, limits=limits,
            clock=clock, random=random, keys=keys, counters=counters, demotion_wait_s=policies.demotion_wait_s,
            deadline_s=deadline_s,
        )  # fmt: skip
        self.storing = Storing(
            arena=arena, catalog=self.catalog, movement=self.movement, claiming=self.claiming,
            sessions=self.sessions, limits=limits, clock=clock, workers=workers, faults=faults, counters=counters,
            deadline_s=deadline_s,
        )  # fmt: skip
        self.joining = Joining(self.catalog, self.claiming, self.fetching, self.movement, counters)
        self.nvme_reason = ""
        """Why there is no device; empty when there is one, or none is wanted."""
        self._is_draining = False

    # ------------------------------------------------------------ the device

    async def attach(self, nvme: NvmeTier) -> None:
        """Take a device into use: what it holds becomes visible. Raises Unavailable when it cannot be read."""
        await self.movement.attach(nvme)

    async def detach(self) -> None:
        """A clean stop of the device, after ``run`` has ended."""
        await self.movement.detach()

    async def run(self) -> None:
        """Everything that goes on without being asked, for ever: movement, expiry."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.movement.run())
            group.create_task(self.sweep(SWEEP_INTERVAL_S))

    # ------------------------------------------------------------ sessions

    def open_session(self, uid: int) -> Session:
        if self._is_draining:
            raise Unavailable("the service is stopping")
        session = self.sessions.open(uid)
        self.counters.add("sessions_opened")
        return session

    async def close_session(self, session: Session) -> None:
        """End a session and all it owns. Idempotent."""
        self.sessions.forget(session)
        for watcher in list(session.watchers):
            self.unwatch(session, watcher)
        self.fetching.release(session, list(session.leases))
        for reservation in list(session.reservations.values()):
            try:
                await self.storing.abandon(reservation)
                self.counters.add("store_aborted_reservations")
            except DeadlineExceeded as error:  # its memory, and the session's staging, are its movers' still
                _log.error("a store of an ended session stays", extra={"reason": error.message})
        if session.reservations:
            return
        for staging_id in list(session.stagings):
            self.close_staging(session, staging_id)

    def create_staging(self, session: Session, byte_count: int) -> Staging:
        return self.sessions.create_staging(session, byte_count)

    def close_staging(self, session: Session, staging_id: int) -> None:
        """Give staging back. The session promises that no fill of it is on its way."""
        if any(reservation.busy for reservation in session.reservations.values()):
            raise InvalidRequest("staging is being read: close it after its commit")
        staging = session.stagings.pop(staging_id, None)
        if staging is not None:
            staging.mapping.close()

    # ------------------------------------------------------------ requests

    def register_model(self, spec: ModelSpec) -> bytes:
        """The fingerprint that names the model in every later call."""
        return self.catalog.register(spec).fingerprint

    def lookup(self, query: ChainQuery, readers: int = 0) -> LookupResult:
        self._check(query)
        self.counters.add("lookup_calls")
        return self.fetching.lookup(query, readers)

    async def lookup_long(self, query: ChainQuery, readers: int = 0) -> LookupResult:
        """As ``lookup``, whatever the chain's length: others are answered in between."""
        if len(query.digests) * (len(query.hidden_layers) + 1) <= STEP_CHUNKS:
            return self.lookup(query, readers)
        self._check(query)
        self.counters.add("lookup_calls")
        return await self.fetching.lookup_in_steps(query, readers, self.long_work.begin())

    async def lookup_segments(self, queries: Sequence[ChainQuery]) -> list[LookupResult]:
        """Each chain by itself. Raises Exhausted when all of them together are too long."""
        self._check(*queries)
        pauses = self.long_work.begin()
        found = []
        for query in queries:
            found.append(await self.fetching.lookup_in_steps(query, 0, pauses))
        return found

    def fetch(self, session: Session, query: ChainQuery) -> FetchResult:
        self._check(query)
        return self.fetching.fetch(session, query)

    def redeem(
        self, session: Session, ticket_id: bytes, layers: tuple[int, ...] = (), hidden_layers: tuple[int, ...] = ()
    ) -> FetchResult:
        """Fetch by a ticket: of a held prefix, or of a store in flight."""
        reservation = self.claiming.by_ticket(ticket_id)
        if reservation is not None:
            return self.joining.fetch(session, reservation, frozenset(layers), hidden_layers)
        return self.fetching.redeem(session, ticket_id, layers)

    def arrivals(self, result: FetchResult, timeout_s: float | None) -> AsyncIterator[list[Arrival]]:
        """What lands of a fetch's chunks, at most ``timeout_s`` seconds (None: controller.deadline_s; as long as a
        store may take where one is joined)."""
        most_s = self.deadline_s
        if has_filling(result.chunks):
            most_s += self.limits.reservation_age_s_max
        return arrivals_of(result, min(timeout_s or most_s, most_s))

    def watch(self, session: Session, tenant: str) -> Watcher:
        """Events from now on, until ``unwatch`` or the session's end. Raises PermissionDenied for another tenant's
        name; Exhausted past limits.watcher_count_max."""
        if tenant not in ("", self.keys.tenant):
            raise PermissionDenied(f"this session is of tenant {self.keys.tenant!r}: watch that, or name none")
        watcher = self.catalog.spaces.events.watch(self.limits.watch_event_count_max, self.limits.watcher_count_max)
        session.watchers.add(watcher)
        return watcher

    def unwatch(self, session: Session, watcher: Watcher) -> None:
        """Watch no longer. Idempotent."""
        session.watchers.discard(watcher)
        watcher.close()

    def release(self, session: Session, lease_ids: list[int]) -> None:
        self.fetching.release(session, lease_ids)

    async def reserve(self, session: Session, request: ReserveRequest) -> StoreResult:
        if self._is_draining:
            raise Unavailable("the service is stopping")
        self._check(request.query)
        return await self.claiming.reserve(session, request)

    async def fill(self, session: Session, reservation_id: int, fills: Sequence[Fill]) -> None:
        await self.storing.fill(session, reservation_id, fills)

    def join(self, session: Session, ticket: bytes, fingerprint: bytes) -> StoreResult:
        return self.claiming.join(session, ticket, fingerprint)

    async def begin_fill(self, session: Session, reservation_id: int, fills: Iterable[Fill]) -> Sequence[Fill]:
        """Have the bytes of a long list moved, others being answered in between. Returns the last of it, which its
        ``fill`` or ``commit`` takes along. Raises what ``fill`` raises; what was begun before counts."""
        pauses = self.long_work.begin()
        batch: list[Fill] = []
        for each in fills:
            if len(batch) == FILL_BATCH:
                self.storing.begin(session, reservation_id, batch)
                await pauses.between()
                batch = []
            batch.append(each)
        return batch

    async def commit(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], shard: int = 0,
        supersedes: Sequence[bytes] = (),
    ) -> StoreResult:  # fmt: skip
        result = await self.storing.commit(session, reservation_id, fills, shard, supersedes)
        if not self._is_write_through or not result.rows:
            return result
        level, reason, _ = await self.movement.settle(result.rows, self.deadline_s)
        return replace(result, durability=level, refusal=result.refusal or reason)

    async def settle(self, query: ChainQuery, timeout_s: float) -> Settled:
        """What the chain's stored prefix has reached once the device is through with it, at most ``timeout_s``
        seconds from now."""
        self._check(query)
        rows = self._resident(query)
        if not rows:
            return Settled(0, Durability.NONE, "nothing of it is stored any more", True)
        parts = len(parts_of(self.catalog, query))
        level, reason, is_settled = await self.movement.settle(rows, timeout_s)
        return Settled(len(rows) // parts, level, reason, is_settled)

    async def abort(self, session: Session, reservation_id: int) -> None:
        await self.storing.abort(session, reservation_id)

    def _check(self, *queries: ChainQuery) -> None:
        """A chain's last chunk may be short: it counts as one token where it is the only one, else not at all."""
        token_count = 0
        for query in queries:
            model = self.catalog.models.get(query.fingerprint)
            token_count += max(1, (len(query.digests) - 1) * (model.spec.chunk_tokens if model else 1))
        if token_count > self.limits.token_count_max:
            raise Exhausted(f"{token_count} tokens or more in one request: raise limits.token_count_max")

    # ------------------------------------------------------------ operators

    def _resident(self, query: ChainQuery) -> list[int]:
        walk = self.catalog.walk(parts_of(self.catalog, query), query.digests)
        return [row for chain in walk.chains for row in chain]

    def stats(self) -> Stats:
        """A consistent snapshot."""
        sessions = list(self.sessions)
        models = []
        for model in self.catalog.models.values():
            spaces = model.namespaces.values()
            count, held = sum(len(each.index) for each in spaces), sum(each.byte_count for each in spaces)
            models.append(ModelCount(model.spec.model_id, model.fingerprint, count, held))
        return Stats(
            capacity_bytes=self.arena.capacity_bytes,
            prefaulted_bytes=self.arena.prefaulted_bytes,
            used_bytes=self.arena.used_bytes,
            leased_bytes=self.fetching.leased_bytes,
            reserved_bytes=self.claiming.reserved_bytes,
            region_count=len(self.arena.regions),
            chunk_count=self.arena.chunk_count,
            session_count=len(sessions),
            reservation_count=sum(len(session.reservations) for session in sessions),
            ticket_count=len(self.tickets),
            ticket_bytes=self.tickets.held_bytes,
            lease_count=sum(len(session.leases) for session in sessions),
            stream_count=sum(session.stream_count for session in sessions),
            watcher_count=len(self.catalog.spaces.events.watchers),
            staging_bytes=self.sessions.staging_bytes,
            models=tuple(models),
            loading_bytes=self.movement.loading_bytes,
            backlog_count=self.movement.backlog_count,
            ghost_count=sum(len(space.ghosts) for space in self.catalog.spaces.numbered),
            nvme=self.movement.nvme_statistics(),
            nvme_reason=self.movement.reason or self.nvme_reason,
            counters=self.counters.snapshot(),
        )

    async def sweep(self, interval_s: float) -> None:
        """Expire old reservations and try again what the device refused, for ever."""
        while True:
            await self._clock.sleep(interval_s)
            await self.storing.expire()
            for session in self.sessions.unfinished():
                await self.close_session(session)
            self.tickets.expire()
            self.movement.retry()

    async def drain(self, grace_s: float) -> None:
        """Take no new stores; let those in flight finish, at most ``grace_s`` seconds."""
        self._is_draining = True
        for watcher in list(self.catalog.spaces.events.watchers):
            watcher.close()
        until = self._clock.monotonic() + grace_s
        while self._clock.monotonic() < until and any(session.reservations for session in self.sessions):
            await self._clock.sleep(DRAIN_STEP_S)
