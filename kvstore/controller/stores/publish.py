"""Publish: a whole chunk becomes visible, and the tiers below memory may take it."""

from __future__ import annotations

import asyncio

from kvstore.chunk import write_mark
from kvstore.controller.parts import Parts
from kvstore.controller.stores.reservation import Entry, Reservation
from kvstore.controller.stores.reservations import Reservations
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import StoreState

TURN_COUNT = 16
"""Chunks that one turn of the service's loop publishes: each takes it tens of microseconds."""


class Publications:
    """Makes the chunks of reservations visible."""

    def __init__(self, parts: Parts, reservations: Reservations) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._movement = parts.movement
        self._reservations = reservations

    def publish_landed(self, reservation: Reservation) -> None:
        """Publish the chunks that are whole, in the chain's order, up to the first that is not. Of many, some now, and
        the rest when others have had their turn."""
        entries = reservation.entries
        for entry in entries[reservation.published : reservation.published + TURN_COUNT]:
            if entry.state is StoreState.WANTED:
                self.publish(entry)
            if entry.state not in (StoreState.COMMITTED, StoreState.PRESENT):
                return
            reservation.published += 1
        if reservation.published < len(entries):
            asyncio.get_running_loop().call_soon(self.publish_landed, reservation)

    def publish(self, entry: Entry) -> None:
        """Publish a WANTED chunk, if all its strips were moved and its parent is visible; else it stays as it is."""
        space, filling = entry.namespace, entry.filling
        assert filling is not None
        if not filling.filled.all() or (entry.parent != ROOT_DIGEST and entry.parent not in space.index):
            return
        filling.write_header()
        row = self._catalog.row_of(space, entry.digest, entry.parent, filling.header.token_count)
        del space.pending[entry.digest]
        self._reservations.reserved_bytes -= filling.placement.byte_count
        self._parts.counters.add("store_committed_chunks")
        self._parts.counters.add("store_committed_bytes", filling.placement.byte_count)
        self._movement.stored(row, filling.placement, write_mark(filling.header.write_id))
        entry.state = StoreState.COMMITTED
        self._catalog.table.hold(row)
        entry.held = row
        filling.committed(self._parts.leases, row)
        entry.tell_end()  # a store that waits for this chunk need not wait for the others
        self._movement.write_down(row)
