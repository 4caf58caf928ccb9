"""Stores in flight: fill, commit, abort. A chunk is visible when every strip of it was moved, checksummed and
committed, and its parent is visible; what a mover refused, lost or failed at was not moved. One writer per chunk: the
others wait for how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np

from kvstore.arena import Arena
from kvstore.catalog import Catalog
from kvstore.chunk import pack_header, write_mark
from kvstore.config import LimitSettings
from kvstore.controller.claiming import Claiming
from kvstore.controller.moving import Move, MoveJob, move, moves_of
from kvstore.controller.reservation import Entry, Reservation
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.values import Fill, StoreResult
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.keys import ROOT_DIGEST
from kvstore.movement import Movement
from kvstore.seams import Clock, FaultPoints, Workers
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import Durability, StoreState
from kvstore.telemetry import Counters

SUPERSEDES_MAX = 4096
"""How many partial chunks one store may put behind all others."""


class Storing:
    """The stores of one tenant."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        movement: Movement,
        claiming: Claiming,
        sessions: Sessions,
        limits: LimitSettings,
        clock: Clock,
        workers: Workers,
        faults: FaultPoints,
        counters: Counters,
        deadline_s: float,
    ) -> None:
        self._arena = arena
        self._catalog = catalog
        self._movement = movement
        self._claiming = claiming
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._workers = workers
        self._faults = faults
        self._counters = counters
        self._deadline_s = deadline_s
        claiming.end = self._end

    # ------------------------------------------------------------ fill

    async def fill(self, session: Session, reservation_id: int, fills: Sequence[Fill]) -> None:
        """Copy strips from staging into their chunks. Raises InvalidRequest for a run that is not the
        reservation's, lies outside its staging, or was filled before."""
        reservation = self._reservation(session, reservation_id)
        self._start(session, reservation, fills)
        await self._wait_idle(reservation)
        for entry in reservation.entries:
            if entry.failure is not None:
                raise type(entry.failure)(f"copying from staging failed: {entry.failure.message}") from entry.failure

    def begin(self, session: Session, reservation_id: int, fills: Sequence[Fill]) -> None:
        """As ``fill``, without waiting for the copies: the ``fill`` or ``commit`` that follows does."""
        self._start(session, self._reservation(session, reservation_id), fills)

    def _start(self, session: Session, reservation: Reservation, fills: Sequence[Fill]) -> None:
        """Have the bytes moved. What moves, moves to its end, whoever still waits for it. Once the first job has begun
        nothing raises: one that the movers refuse has failed, and who waits hears of it when the others have ended."""
        jobs: list[tuple[Entry, Move, MoveJob]] = []
        claimed: list[tuple[Entry, int, int]] = []
        try:
            for each in fills:
                jobs += [(entry, one, one.job) for entry, one in self._moves(session, reservation, each, claimed)]
        except BaseException:
            for entry, first, count in claimed:
                entry.claimed[first : first + count] = False
            raise
        for entry, each_move, arguments in jobs:
            job = asyncio.wrap_future(begun(self._workers, move, *arguments))
            entry.moving.add(job)
            reservation.busy += 1
            reservation.idle.clear()
            job.add_done_callback(partial(self._moved, reservation, entry, each_move))

    def _moved(self, reservation: Reservation, entry: Entry, each_move: Move, job: asyncio.Future[bytes]) -> None:
        entry.moving.discard(job)
        failure = failure_of(job) or each_move.wrong(job.result())
        if failure is not None:
            entry.failure = failure
        else:
            self._counters.add("store_verified_bytes", entry.moved(each_move, job.result()))
        reservation.busy -= 1
        if not reservation.busy:
            self._faults.reach("store.filled")
            reservation.idle.set()

    def _moves(
        self, session: Session, reservation: Reservation, fill: Fill, claimed: list[tuple[Entry, int, int]]
    ) -> list[tuple[Entry, Move]]:
        if not 0 <= fill.chunk < len(reservation.entries):
            raise InvalidRequest(f"the reservation has no chunk {fill.chunk}")
        entry = reservation.entries[fill.chunk]
        layout, placement, header = entry.layout, entry.placement, entry.header
        if entry.state is not StoreState.WANTED or layout is None or placement is None or header is None:
            raise InvalidRequest(f"chunk {fill.chunk} of the reservation is {entry.state.name}, it takes no bytes")
        stop = fill.strip_first + fill.strip_count
        if fill.strip_first < 0 or fill.strip_count < 1 or stop > layout.strip_count:
            raise InvalidRequest(f"strips {fill.strip_first}..{stop} of a chunk of {layout.strip_count}")
        if entry.claimed[fill.strip_first : stop].any():
            raise InvalidRequest(f"strips {fill.strip_first}..{stop} were filled before")
        base = int(layout.strip_offsets[fill.strip_first])
        end = int(layout.strip_offsets[stop - 1]) + int(layout.strip_lengths[stop - 1])
        source = session_run(session, fill.staging_id, fill.staging_offset, end - base)
        entry.claimed[fill.strip_first : stop] = True
        claimed.append((entry, fill.strip_first, fill.strip_count))
        return [(entry, each) for each in moves_of(layout, header, placement, fill.strip_first, stop, source)]

    # ------------------------------------------------------------ commit and abort

    async def commit(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], shard: int = 0,
        supersedes: Sequence[bytes] = (),
    ) -> StoreResult:  # fmt: skip
        """Do the fills that came along, publish every complete chunk whose parent is visible as soon as its bytes are
        there, and tell how far the chain is resident now. Waits for other writers' chunks of the chain, at most the
        deadline. Of several shards the last does so; the others wait for it. ``supersedes``: digests of partial chunks
        that these begin with."""
        reservation = self._reservation(session, reservation_id)
        if len(reservation.supersedes) + len(supersedes) > SUPERSEDES_MAX:
            raise InvalidRequest(f"supersedes: more than {SUPERSEDES_MAX} digests in one store")
        if not 0 <= shard < reservation.shard_count:
            raise InvalidRequest(f"shard {shard} of a store with {reservation.shard_count}")
        self._start(session, reservation, fills)
        reservation.supersedes += supersedes
        if reservation.shard_count > 1 and not await self._is_last(reservation, shard):
            return self._outcome(reservation)
        try:
            await self._publish_all(reservation)
        finally:
            reservation.is_publishing = False  # where this was cancelled, a commit that comes again goes on
        return self._outcome(reservation)

    async def _publish_all(self, reservation: Reservation) -> None:
        others = {entry.ended for entry in reservation.entries if entry.state is StoreState.PENDING and entry.ended}
        for entry in reservation.entries:
            if entry.state is StoreState.PENDING and others:
                await asyncio.wait(others, timeout=self._deadline_s / 2)  # the caller's own deadline is no longer
                others = set()
            if entry.moving:
                await asyncio.wait(entry.moving, timeout=self._deadline_s)
            if reservation.has_ended:
                raise InvalidRequest(f"reservation {reservation.reservation_id} ended while it was committed")
            self._faults.reach("store.commit")
            if entry.state is StoreState.WANTED:
                self._publish(entry)
            if entry.state is StoreState.WANTED and not entry.moving:
                reservation.refusal = reservation.refusal or _missing(entry)
        await self._wait_idle(reservation)
        self._supersede(reservation)
        self._end(reservation)

    def _supersede(self, reservation: Reservation) -> None:
        """Partial chunks that chunks of this store begin with go before others. Only those beside a chunk that was
        committed here, and shorter: who names another one of its tenant's changes nothing."""
        if not reservation.supersedes:
            return
        for part in {entry.namespace for entry in reservation.entries}:
            beside = {
                entry.parent: entry.header.token_count
                for entry in reservation.entries
                if entry.namespace is part and entry.state is StoreState.COMMITTED and entry.header is not None
            }
            for digest in reservation.supersedes:
                row = part.index.get(digest)
                if row is not None and self._catalog.is_tail_of(row, beside):
                    self._movement.superseded(row)

    async def _is_last(self, reservation: Reservation, shard: int) -> bool:
        """Whether this shard's commit completes the store. If not, wait for the one that does, or for its end."""
        await self._wait_idle(reservation)
        if reservation.has_ended:
            return False
        reservation.committed.add(shard)
        if len(reservation.committed) == reservation.shard_count and not reservation.is_publishing:
            reservation.is_publishing = True
            return True
        try:
            await asyncio.wait_for(reservation.ended.wait(), self._limits.reservation_age_s_max + self._deadline_s)
        except TimeoutError:
            raise DeadlineExceeded("the other shards did not commit: look at their writers") from None
        return False

    def _publish(self, entry: Entry) -> None:
        part = entry.namespace
        if not entry.filled.all() or (entry.parent != ROOT_DIGEST and entry.parent not in part.index):
            return
        assert entry.layout is not None
        assert entry.placement is not None
        assert entry.header is not None
        packed = pack_header(entry.header, entry.layout)
        np.copyto(entry.placement.pieces[0], np.frombuffer(packed, np.uint8))
        row = self._catalog.row_of(part, entry.digest, entry.parent, entry.header.token_count)
        del part.pending[entry.digest]
        self._claiming.reserved_bytes -= entry.placement.byte_count
        self._counters.add("store_committed_chunks")
        self._counters.add("store_committed_bytes", entry.placement.byte_count)
        self._movement.stored(row, entry.placement, write_mark(entry.header.write_id))
        entry.state, entry.placement = StoreState.COMMITTED, None
        self._catalog.table.hold(row)
        entry.held = row
        if entry.filling is not None:
            entry.filling.committed(self._catalog, row)
        if entry.ended is not None and not entry.ended.done():
            entry.ended.set_result(None)  # who waits for this chunk need not wait for the others
        self._movement.write_down(row)

    def _outcome(self, reservation: Reservation) -> StoreResult:
        """Truth, not intention: what the catalog holds now."""
        for entry in reservation.entries:
            here = entry.digest in entry.namespace.index
            if entry.state is StoreState.PENDING:
                entry.state = StoreState.PRESENT if here else StoreState.ABORTED
        count = 0
        for start in range(0, len(reservation.entries), reservation.part_count):
            chunk = reservation.entries[start : start + reservation.part_count]
            if not all(entry.digest in entry.namespace.index for entry in chunk):
                break
            count += 1
        parts = [reservation.entries[part].namespace for part in range(reservation.part_count)]
        rows: list[int] = []
        for number, part in enumerate(parts):
            chain = [
                part.index[entry.digest] for entry in reservation.entries[number :: reservation.part_count][:count]
            ]
            self._movement.used(chain)
            rows += chain
        states = tuple(entry.state for entry in reservation.entries)
        level = Durability.MEMORY if count else Durability.NONE
        return StoreResult(reservation.reservation_id, states, count, level, reservation.refusal, tuple(rows))

    async def abort(self, session: Session, reservation_id: int) -> None:
        """Drop a reservation. Unknown ids are fine: it ended before."""
        reservation = session.reservations.get(reservation_id)
        if reservation is not None:
            self._counters.add("store_aborted_reservations")
            await self.abandon(reservation)

    async def abandon(self, reservation: Reservation) -> None:
        """End a reservation once no byte mover works for it."""
        await self._wait_idle(reservation)
        self._end(reservation)

    async def expire(self) -> None:
        """Abort reservations older than limits.reservation_age_s_max."""
        born_before = self._clock.monotonic() - self._limits.reservation_age_s_max
        for session in self._sessions:
            for reservation in list(session.reservations.values()):
                if reservation.born_s <= born_before and not reservation.busy:
                    self._counters.add("store_expired_reservations")
                    await self.abandon(reservation)

    async def _wait_idle(self, reservation: Reservation) -> None:
        """The movers' jobs are finite copies in memory; they end without outside help."""
        while reservation.busy:
            try:
                await asyncio.wait_for(reservation.idle.wait(), self._deadline_s)
            except TimeoutError:
                raise DeadlineExceeded("bytes of this store are still moving: wait and try again") from None

    def _end(self, reservation: Reservation) -> None:
        """Free what was not committed and wake who waited."""
        assert not reservation.busy, "byte movers still write to it"
        reservation.ended.set()
        self._claiming.forget(reservation)
        for session in reservation.sessions:
            session.reservations.pop(reservation.reservation_id, None)
        for entry in reservation.entries:
            if entry.held is not None:
                self._catalog.unhold(entry.held)
                entry.held = None
            if entry.placement is not None:
                self._catalog.unclaim(entry.namespace, entry.digest)
                self._claiming.reserved_bytes -= entry.placement.byte_count
                if entry.filling is not None:
                    entry.filling.aborted()
                self._arena.free(entry.placement)
                entry.placement = None
                entry.state = StoreState.ABORTED
            if entry.state in (StoreState.COMMITTED, StoreState.ABORTED) and entry.ended and not entry.ended.done():
                entry.ended.set_result(None)

    def _reservation(self, session: Session, reservation_id: int) -> Reservation:
        try:
            return session.reservations[reservation_id]
        except KeyError:
            raise InvalidRequest(
                f"this session has no reservation {reservation_id}: it ended, was aborted for its age "
                "(limits.reservation_age_s_max), or another of its writers aborted it or went"
            ) from None


def _missing(entry: Entry) -> str:
    """Why a chunk whose bytes are not on their way is not published."""
    if entry.failure is not None:
        return f"copying from staging failed: {entry.failure.message}"
    missing = int(entry.filled.size - np.count_nonzero(entry.filled))
    if missing:
        return f"{missing} of {entry.filled.size} strips of a chunk were never written: put every layer and head of it"
    return "the chunk before it is not stored any more"


def session_run(session: Session, staging_id: int, offset: int, byte_count: int) -> np.ndarray:
    """A run of a session's staging, checked against its bounds."""
    return session.staging(staging_id).run(offset, byte_count)
