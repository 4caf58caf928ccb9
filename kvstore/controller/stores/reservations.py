"""All stores in flight: their beginning and their end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.stores.reservation import Entry, Reservation
from kvstore.controller.values import StoreResult
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest
from kvstore.seams import Deadline
from kvstore.spec import Durability, StoreState


class Reservations:
    """The stores in flight of one tenant, by session and by ticket."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._of: dict[Session, dict[int, Reservation]] = {}
        self._by_ticket: dict[bytes, Reservation] = {}
        self._making: Counter[Session] = Counter()
        self.reserved_bytes = 0
        """Bytes allocated for chunks that are being stored."""

    def of(self, session: Session) -> list[Reservation]:
        """Return the stores that a session writes, alone or with others."""
        return list(self._of.get(session, {}).values())

    def are_moving(self, session: Session) -> bool:
        """True when byte movers may still read the session's staging."""
        return any(each.busy for each in self.of(session))

    def find(self, session: Session, reservation_id: int) -> Reservation:
        """Return a session's store by its id. Raises InvalidRequest for a store that this session does not write."""
        try:
            return self._of[session][reservation_id]
        except KeyError:
            raise InvalidRequest(
                f"this session has no reservation {reservation_id}: it ended, was aborted for its age "
                "(limits.reservation_age_s_max), or another of its writers aborted it or went"
            ) from None

    def by_ticket(self, ticket: bytes) -> Reservation | None:
        """Return the store in flight that a ticket names, if there is one."""
        return self._by_ticket.get(ticket)

    @property
    def chunk_count(self) -> int:
        """Chunks that stores in flight are to write; a store that is being reserved counts as one."""
        in_flight = (entry for each in self._by_ticket.values() for entry in each.entries)
        return sum(entry.state is StoreState.WANTED for entry in in_flight) + self._making.total()

    # ------------------------------------------------------------ begin

    @contextmanager
    def making(self, session: Session) -> Iterator[None]:
        """Count a reservation while it is being made. Raises Exhausted past limits.reservation_count_max."""
        self._check_count(session)
        self._making[session] += 1
        try:
            yield
        finally:
            self._making[session] -= 1
            if not self._making[session]:
                del self._making[session]

    def add(self, reservation: Reservation) -> None:
        """Register a reservation whose chunks are all claimed: from now on it can be filled, joined and ended."""
        for session in reservation.sessions:
            self._of.setdefault(session, {})[reservation.reservation_id] = reservation
        self._by_ticket[reservation.ticket] = reservation
        self._parts.counters.add("store_reservations")

    def join(self, session: Session, ticket: bytes, fingerprint: bytes, durability: Durability) -> StoreResult:
        """Have another session write some shards of a store. Raises InvalidRequest for a store that ended, or of
        another model; Exhausted past limits.reservation_count_max."""
        reservation = self.by_ticket(ticket)
        if reservation is None:
            raise InvalidRequest(
                "this store was committed or aborted, or one of its writers went: the caches of all shards are dropped"
            )
        if fingerprint != reservation.fingerprint:
            raise InvalidRequest(
                "this writer's spec differs from the one that the store was started with: compare them"
            )
        if session not in reservation.sessions:
            self._check_count(session)
            reservation.sessions.append(session)
            self._of.setdefault(session, {})[reservation.reservation_id] = reservation
        reservation.want(durability)
        return reservation.result

    def _check_count(self, session: Session) -> None:
        count = len(self._of.get(session, ())) + self._making[session]
        if count >= self._parts.limits.reservation_count_max:
            raise Exhausted(f"this session holds {count} reservations: raise limits.reservation_count_max")

    # ------------------------------------------------------------ end

    async def abort(self, session: Session, reservation_id: int, deadline: Deadline) -> None:
        """Drop a reservation. An unknown id is no error: it ended before."""
        reservation = self._of.get(session, {}).get(reservation_id)
        if reservation is not None:
            await self.abandon(reservation, deadline)

    def expire(self) -> None:
        """Abort reservations older than limits.reservation_age_s_max."""
        born_before = self._parts.clock.monotonic() - self._parts.limits.reservation_age_s_max
        for reservation in [each for of in self._of.values() for each in of.values()]:
            if reservation.born_s <= born_before and not reservation.busy and not reservation.has_ended:
                self._parts.counters.add("store_expired_reservations")
                self.end(reservation)

    async def abandon(self, reservation: Reservation, deadline: Deadline) -> None:
        """End a reservation once no byte mover works for it, and count it as aborted, unless it was committed
        meanwhile. Raises DeadlineExceeded when a mover is not done in time."""
        await self.idle(reservation, deadline)
        if not reservation.has_ended:
            self._parts.counters.add("store_aborted_reservations")
            self.end(reservation)

    async def idle(self, reservation: Reservation, deadline: Deadline) -> None:
        """Wait until no byte mover works for a store. The jobs are finite copies in memory, which end without outside
        help. Raises DeadlineExceeded when a job does not end in time."""
        while reservation.busy:
            try:
                async with asyncio.timeout(deadline.left_s):
                    await reservation.idle.wait()
            except TimeoutError:
                raise DeadlineExceeded("bytes of this store are still moving: wait and try again") from None

    def end(self, reservation: Reservation) -> None:
        """End a reservation: free its chunks that were not committed, and wake the calls that wait for it.
        Idempotent."""
        assert not reservation.busy, "byte movers still write to it"
        if reservation.has_ended:
            return  # some of its entries may tell the state of another store's chunk by now
        reservation.ended.set()
        if reservation.use is not None:
            reservation.use.end()
        self._by_ticket.pop(reservation.ticket, None)
        for session in reservation.sessions:
            of = self._of.get(session, {})
            of.pop(reservation.reservation_id, None)
            if not of:
                self._of.pop(session, None)
        for entry in reservation.entries:
            if entry.held is not None:
                self._catalog.unhold(entry.held)
                entry.held = None
            if entry.state is StoreState.WANTED:
                self._drop(entry)
            if entry.state in (StoreState.COMMITTED, StoreState.ABORTED):
                entry.tell_end()

    def _drop(self, entry: Entry) -> None:
        """Give back the room of a chunk that was not committed."""
        assert entry.filling is not None
        self._catalog.unclaim(entry.namespace, entry.digest)
        self.reserved_bytes -= entry.filling.placement.byte_count
        entry.filling.aborted()
        self._parts.arena.free(entry.filling.placement)
        entry.state = StoreState.ABORTED
