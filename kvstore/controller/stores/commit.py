"""Commit: complete chunks of a store become visible."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.stores.fill import Fills
from kvstore.controller.stores.filling import Filling
from kvstore.controller.stores.publish import Publications
from kvstore.controller.stores.reservation import Reservation
from kvstore.controller.stores.reservations import Reservations
from kvstore.controller.values import Fill, StoreResult
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.keys import SUPERSEDES_MAX
from kvstore.seams import Deadline
from kvstore.spec import Durability, StoreState


class Commits:
    """Publishes the chunks of reservations, and ends them."""

    def __init__(self, parts: Parts, reservations: Reservations, fills: Fills) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._movement = parts.movement
        self._reservations = reservations
        self._fills = fills
        self._publications = Publications(parts, reservations)

    async def commit(
        self, session: Session, reservation_id: int, fills: Sequence[Fill], shard: int = 0,
        supersedes: Sequence[bytes] = (), *, deadline: Deadline,
    ) -> StoreResult:  # fmt: skip
        """Start ``fills``, publish every complete chunk whose parent is visible as soon as its bytes are moved, and
        return how much of the chain is stored now. Waits for other writers' chunks of the chain, one after the other,
        at most half of the time to the deadline. Of several shards the last one publishes; the others wait for it while
        the store lasts. ``supersedes``: digests of partial chunks that chunks of this store begin with. Raises
        DeadlineExceeded while bytes still move at the deadline, or when other shards do not commit in time."""
        reservation = self._reservations.find(session, reservation_id)
        if len(reservation.supersedes) + len(supersedes) > SUPERSEDES_MAX:
            raise InvalidRequest(f"supersedes: more than {SUPERSEDES_MAX} digests in one store")
        if not 0 <= shard < reservation.shard_count:
            raise InvalidRequest(f"shard {shard} of a store with {reservation.shard_count}")
        self._fills.start(session, reservation, fills)
        reservation.supersedes += supersedes
        if reservation.shard_count > 1 and not await self._is_last(reservation, shard, deadline):
            return self._outcome(reservation)
        try:
            await self._publish_all(reservation, deadline)
        finally:
            reservation.is_publishing = False  # after a cancellation, a repeated commit goes on
        return self._outcome(reservation)

    async def _publish_all(self, reservation: Reservation, deadline: Deadline) -> None:
        patience, pauses = None, self._parts.long_work.begin()
        for entry in reservation.entries:
            await pauses.between()
            if entry.state is StoreState.PENDING and entry.ended is not None and not entry.ended.done():
                # Not for the later ones, too: their writer may be waiting for a chunk of ours that comes before them.
                patience = patience or deadline.sooner(deadline.left_s / 2)  # so that the caller hears the answer
                await asyncio.wait([entry.ended], timeout=patience.left_s)
            filling = entry.filling
            if filling is not None and filling.moving:
                await asyncio.wait(filling.moving, timeout=deadline.left_s)
            if reservation.has_ended:
                raise InvalidRequest(f"reservation {reservation.reservation_id} ended while it was committed")
            self._parts.faults.reach("store.commit")
            if entry.state is StoreState.WANTED:
                self._publications.publish(entry)
            if entry.state is StoreState.WANTED and filling is not None and not filling.moving:
                reservation.refusal = reservation.refusal or _missing(filling)
        await self._reservations.idle(reservation, deadline)
        self._supersede(reservation)
        self._reservations.end(reservation)

    def _supersede(self, reservation: Reservation) -> None:
        """Mark superseded partial chunks: they leave before others. Only a shorter chunk beside a chunk that was
        committed here is marked: a writer that names any other chunk changes nothing."""
        if not reservation.supersedes:
            return
        for space in {entry.namespace for entry in reservation.entries}:
            beside = {
                entry.parent: entry.filling.header.token_count
                for entry in reservation.entries
                if entry.namespace is space and entry.state is StoreState.COMMITTED and entry.filling is not None
            }
            for digest in reservation.supersedes:
                row = space.index.get(digest)
                if row is not None and self._catalog.is_tail_of(row, beside):
                    self._movement.goes_first(row)

    async def _is_last(self, reservation: Reservation, shard: int, deadline: Deadline) -> bool:
        """Return True when this shard's commit is the last one. Otherwise wait until the store has ended, and return
        False."""
        await self._reservations.idle(reservation, deadline)
        if reservation.has_ended:
            return False
        reservation.committed.add(shard)
        if len(reservation.committed) == reservation.shard_count and not reservation.is_publishing:
            reservation.is_publishing = True
            return True
        try:
            until = deadline.later(self._parts.limits.reservation_age_s_max)
            async with asyncio.timeout(until.left_s):
                await reservation.ended.wait()
        except TimeoutError:
            raise DeadlineExceeded("the other shards did not commit: look at their writers") from None
        return False

    def _outcome(self, reservation: Reservation) -> StoreResult:
        """Return the result as the catalog has the chain now, whoever stored its chunks. A store is one use of them,
        however many shards it has."""
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
        spaces = [entry.namespace for entry in reservation.entries[: reservation.part_count]]
        rows: list[int] = []
        for number, space in enumerate(spaces):
            chain = [
                space.index[entry.digest] for entry in reservation.entries[number :: reservation.part_count][:count]
            ]
            if not reservation.is_counted:
                self._movement.used(chain)
            rows += chain
        reservation.is_counted = True
        states = tuple(entry.state for entry in reservation.entries)
        for wanted in reservation.levels:
            self._movement.levels.demand(rows, wanted)
        level = Durability.MEMORY if count else Durability.NONE
        return StoreResult(reservation.reservation_id, states, count, level, reservation.refusal, tuple(rows))


def _missing(filling: Filling) -> str:
    """Return the reason why a chunk is not published though no move of its bytes runs any more."""
    if filling.failure is not None:
        return f"copying from staging failed: {filling.failure.message}"
    missing = int(filling.filled.size - np.count_nonzero(filling.filled))
    if missing:
        return (
            f"{missing} of {filling.filled.size} strips of a chunk were never written: put every layer and head of it"
        )
    return "the chunk before it is not stored any more"
