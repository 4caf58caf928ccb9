"""The controller: one tenant's service, whole."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.arena import Arena, Staging
from kvstore.catalog import Catalog, Record
from kvstore.config import LimitSettings
from kvstore.controller.capacity import Capacity
from kvstore.controller.fetching import Fetching, parts_of
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.storing import Storing
from kvstore.controller.values import (
    ChainQuery,
    FetchResult,
    Fill,
    LookupResult,
    ModelCount,
    ReserveRequest,
    Stats,
    StoreResult,
)
from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.policy import EvictionPolicy
from kvstore.seams import Clock, FaultPoints, Memory, Random, TenantKeys, Workers
from kvstore.spec import ModelSpec
from kvstore.telemetry import Counters

DRAIN_STEP_S = 0.01


class Controller:
    """Answers one tenant's requests. Every method runs on the event loop's thread.

    Raises: what ``kvstore.errors`` draws; a miss is never an error.
    """

    def __init__(
        self,
        *,
        arena: Arena,
        policy: EvictionPolicy[Record],
        limits: LimitSettings,
        clock: Clock,
        random: Random,
        memory: Memory,
        workers: Workers,
        keys: TenantKeys,
        faults: FaultPoints,
        counters: Counters,
        deadline_s: float = 10.0,
    ) -> None:
        self.arena = arena
        self.limits = limits
        self.counters = counters
        self.keys = keys
        self._clock = clock
        self.catalog = Catalog(limits.model_count_max)
        self.sessions = Sessions(limits, random, memory)
        self.fetching = Fetching(self.catalog, policy, self.sessions, limits, clock, counters)
        self.capacity = Capacity(arena, self.catalog, policy, counters, self.fetching.revoke_stale)
        self.storing = Storing(
            arena=arena, catalog=self.catalog, policy=policy, capacity=self.capacity, sessions=self.sessions,
            limits=limits, clock=clock, random=random, workers=workers, keys=keys, faults=faults, counters=counters,
            deadline_s=deadline_s,
        )  # fmt: skip
        self._pinned_bytes = 0
        self._is_draining = False

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
        self.fetching.release(session, list(session.leases))
        for reservation in list(session.reservations.values()):
            self.counters.add("store_aborted_reservations")
            await self.storing.abandon(reservation)
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

    def lookup(self, query: ChainQuery) -> LookupResult:
        self._check(query)
        return self.fetching.lookup(query)

    def fetch(self, session: Session, query: ChainQuery) -> FetchResult:
        self._check(query)
        return self.fetching.fetch(session, query)

    def release(self, session: Session, lease_ids: list[int]) -> None:
        self.fetching.release(session, lease_ids)

    def reserve(self, session: Session, request: ReserveRequest) -> StoreResult:
        if self._is_draining:
            raise Unavailable("the service is stopping")
        self._check(request.query)
        return self.storing.reserve(session, request)

    async def fill(self, session: Session, reservation_id: int, fills: Sequence[Fill]) -> None:
        await self.storing.fill(session, reservation_id, fills)

    async def commit(self, session: Session, reservation_id: int, fills: Sequence[Fill]) -> StoreResult:
        return await self.storing.commit(session, reservation_id, fills)

    async def abort(self, session: Session, reservation_id: int) -> None:
        await self.storing.abort(session, reservation_id)

    def _check(self, query: ChainQuery) -> None:
        model = self.catalog.models.get(query.fingerprint)
        token_count = len(query.digests) * (model.spec.chunk_tokens if model else 1)
        if token_count > self.limits.token_count_max + (model.spec.chunk_tokens if model else 0):
            raise Exhausted(f"{token_count} tokens in one request: raise limits.token_count_max")

    # ------------------------------------------------------------ operators

    def pin(self, query: ChainQuery) -> int:
        """Keep the resident prefix of a chain. Returns how many chunks. Raises Exhausted past limits.pin_bytes_max."""
        records = self._resident(query)
        fresh = sum(record.placement.byte_count for record in records if not record.pin_count)
        if self._pinned_bytes + fresh > self.limits.pin_bytes_max:
            raise Exhausted(f"{self._pinned_bytes + fresh} pinned bytes: raise limits.pin_bytes_max")
        self._pinned_bytes += fresh
        for record in records:
            record.pin_count += 1
        return len(records)

    def unpin(self, query: ChainQuery) -> int:
        """Undo one ``pin`` of the chain. Returns how many chunks."""
        records = [record for record in self._resident(query) if record.pin_count]
        for record in records:
            record.pin_count -= 1
            if not record.pin_count:
                self._pinned_bytes -= record.placement.byte_count
        return len(records)

    def _resident(self, query: ChainQuery) -> list[Record]:
        parts = parts_of(self.catalog, query)
        hits = self.catalog.walk(parts, query.digests).hit_count
        return [part.index[digest] for part in parts for digest in query.digests[:hits]]

    def stats(self) -> Stats:
        """A consistent snapshot."""
        sessions = list(self.sessions)
        models = []
        for model in self.catalog.models.values():
            records = [record for each in model.namespaces.values() for record in each.index.values()]
            held = sum(record.placement.byte_count for record in records)
            models.append(ModelCount(model.spec.model_id, model.fingerprint, len(records), held))
        return Stats(
            capacity_bytes=self.arena.capacity_bytes,
            prefaulted_bytes=self.arena.prefaulted_bytes,
            used_bytes=self.arena.used_bytes,
            leased_bytes=self.fetching.leased_bytes,
            pinned_bytes=self._pinned_bytes,
            reserved_bytes=self.storing.reserved_bytes,
            region_count=len(self.arena.regions),
            chunk_count=self.arena.chunk_count,
            session_count=len(sessions),
            reservation_count=sum(len(session.reservations) for session in sessions),
            lease_count=sum(len(session.leases) for session in sessions),
            stream_count=sum(session.stream_count for session in sessions),
            staging_bytes=self.sessions.staging_bytes,
            models=tuple(models),
            counters=self.counters.snapshot(),
        )

    async def sweep(self, interval_s: float) -> None:
        """Expire old reservations, for ever."""
        while True:
            await self._clock.sleep(interval_s)
            await self.storing.expire()

    async def drain(self, grace_s: float) -> None:
        """Take no new stores; let those in flight finish, at most ``grace_s`` seconds."""
        self._is_draining = True
        until = self._clock.monotonic() + grace_s
        while self._clock.monotonic() < until and any(session.reservations for session in self.sessions):
            await self._clock.sleep(DRAIN_STEP_S)
