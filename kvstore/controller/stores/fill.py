"""Fill: byte movers copy strips from staging into their chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial

from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.stores.filling import Filling
from kvstore.controller.stores.mover import Move, MoveJob, move, moves_of
from kvstore.controller.stores.publish import Publications
from kvstore.controller.stores.reservation import Reservation
from kvstore.controller.stores.reservations import Reservations
from kvstore.controller.values import Fill
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.seams import Deadline
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import StoreState

BATCH_COUNT = 16
"""Fills whose moves are begun at once: each takes the service's loop a fraction of a millisecond."""
JOBS_AHEAD_MAX = 64
"""Jobs of a store that may be before the movers when a long list goes on: they serve others, too. With the usual
megabytes in each they are enough to keep all movers busy."""


class Fills:
    """Has byte movers fill reservations."""

    def __init__(self, parts: Parts, reservations: Reservations) -> None:
        self._parts = parts
        self._reservations = reservations
        self._publications = Publications(parts, reservations)
        self._job_ended = asyncio.Event()

    async def fill(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], deadline: Deadline, *, at_once: bool = False
    ) -> None:
        """Copy strips from staging into their chunks. Raises InvalidRequest for a run that is not the
        reservation's, lies outside its staging, or was filled before; DeadlineExceeded while bytes still move at the
        deadline.

        ``at_once``: from now on chunks of this store are published as soon as they are whole. Returns when the copies
        have begun; the commit tells of failures. Raises InvalidRequest for a store of several shards, too."""
        reservation = self._reservations.find(session, reservation_id)
        if at_once and reservation.shard_count > 1:
            raise InvalidRequest("at_once: a store of several shards is published when all of them have committed")
        self.start(session, reservation, fills)
        if at_once:
            reservation.is_at_once = True
            return
        await self._reservations.idle(reservation, deadline)
        for failure in (each.failure for each in reservation.fillings):
            if failure is not None:
                raise type(failure)(f"copying from staging failed: {failure.message}") from failure

    async def begin(
        self, session: Session, reservation_id: int, fills: Iterable[Fill], deadline: Deadline
    ) -> Sequence[Fill]:
        """Start the moves of a long list, and answer others in between. Return the last fills, not yet started, for the
        ``fill`` or ``commit`` that follows. Raises as ``fill``; moves that were started before an error count."""
        pauses = self._parts.long_work.begin()
        batch: list[Fill] = []
        for each in fills:
            if len(batch) == BATCH_COUNT:
                reservation = self._reservations.find(session, reservation_id)
                await self._room(reservation, deadline)
                self.start(session, self._reservations.find(session, reservation_id), batch)
                await pauses.between()
                batch = []
            batch.append(each)
        return batch

    async def _room(self, reservation: Reservation, deadline: Deadline) -> None:
        """Wait until the movers have few of this store's jobs before them. Raises DeadlineExceeded."""
        while reservation.busy >= JOBS_AHEAD_MAX:
            self._job_ended.clear()
            try:
                async with asyncio.timeout(deadline.left_s):
                    await self._job_ended.wait()
            except TimeoutError:
                raise DeadlineExceeded("the bytes of stores move too slowly: send fewer at once") from None

    def start(self, session: Session, reservation: Reservation, fills: Sequence[Fill]) -> None:
        """Start the moves, without waiting for them. A move that has started is finished even if its caller is gone:
        until then the memory is in use. Once the first job has begun nothing raises: a job that the movers refuse
        counts as failed, and the caller hears of it when the others have ended."""
        jobs: list[tuple[Filling, Move, MoveJob]] = []
        claimed: list[tuple[Filling, int, int]] = []
        try:
            for each in fills:
                moves = self._moves(session, reservation, each, claimed, len(fills))
                jobs += [(filling, one, one.job) for filling, one in moves]
        except BaseException:
            for filling, first, count in claimed:
                filling.claimed[first : first + count] = False
            raise
        for filling, each_move, arguments in jobs:
            job = asyncio.wrap_future(begun(self._parts.workers, move, *arguments))
            filling.moving.add(job)
            reservation.busy += 1
            reservation.idle.clear()
            job.add_done_callback(partial(self._moved, reservation, filling, each_move))

    def _moved(self, reservation: Reservation, filling: Filling, each_move: Move, job: asyncio.Future[bytes]) -> None:
        filling.moving.discard(job)
        failure = failure_of(job) or each_move.wrong(job.result())
        if failure is not None:
            filling.failure = failure
        else:
            self._parts.counters.add("store_verified_bytes", filling.moved(each_move, job.result()))
        reservation.busy -= 1
        self._job_ended.set()
        if not reservation.busy:
            self._parts.faults.reach("store.filled")
            reservation.idle.set()
        if reservation.is_at_once and not filling.moving:
            self._publications.publish_landed(reservation)

    def _moves(
        self, session: Session, reservation: Reservation, fill: Fill, claimed: list[tuple[Filling, int, int]],
        fill_count: int,
    ) -> list[tuple[Filling, Move]]:  # fmt: skip
        if not 0 <= fill.chunk < len(reservation.entries):
            raise InvalidRequest(f"the reservation has no chunk {fill.chunk}")
        entry = reservation.entries[fill.chunk]
        filling = entry.filling
        if entry.state is not StoreState.WANTED or filling is None:
            raise InvalidRequest(f"chunk {fill.chunk} of the reservation is {entry.state.name}, it takes no bytes")
        layout = filling.layout
        stop = fill.strip_first + fill.strip_count
        if fill.strip_first < 0 or fill.strip_count < 1 or stop > layout.strip_count:
            raise InvalidRequest(f"strips {fill.strip_first}..{stop} of a chunk of {layout.strip_count}")
        if filling.claimed[fill.strip_first : stop].any():
            raise InvalidRequest(f"strips {fill.strip_first}..{stop} were filled before")
        base = int(layout.strip_offsets[fill.strip_first])
        end = int(layout.strip_offsets[stop - 1]) + int(layout.strip_lengths[stop - 1])
        source = session.staging(fill.staging_id).run(fill.staging_offset, end - base)
        filling.claimed[fill.strip_first : stop] = True
        claimed.append((filling, fill.strip_first, fill.strip_count))
        moves = moves_of(layout, filling.header, filling.placement, fill.strip_first, stop, source, fill_count)
        return [(filling, each) for each in moves]
