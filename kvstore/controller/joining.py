"""Reading a store that is still being written: its layers as they are filled, provisional until it is committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore.arena import Placement
from kvstore.catalog import Catalog
from kvstore.chunk import pack_header
from kvstore.controller.claiming import Claiming
from kvstore.controller.fetching import Fetching, Lease
from kvstore.controller.reservation import Entry, Reservation
from kvstore.controller.sessions import Session
from kvstore.controller.values import FetchResult, Resident
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.movement import Loading, Movement
from kvstore.spec import MissReason, StoreState, Tier
from kvstore.telemetry import Counters


@dataclass(eq=False)
class Filling:
    """A chunk on its way to memory from its writers, as ``Loading`` is one from the device. ``landed``: the slabs that
    are filled; provisional until ``has_landed``, which is when the chunk is committed."""

    entry: Entry
    placement: Placement
    landed: int = 0
    lost: MissReason = MissReason.NONE
    has_landed: bool = False
    listeners: dict[asyncio.Event, None] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)

    @property
    def slab_count(self) -> int:
        assert self.entry.layout is not None
        return len(self.entry.layout.slabs)

    @property
    def is_provisional(self) -> bool:
        return not self.has_landed

    def moved(self) -> None:
        """Some strips were filled: whole slabs of them can be read."""
        assert self.entry.layout is not None
        whole = np.logical_and.reduceat(self.entry.filled, self.entry.layout.slab_firsts)
        landed = sum(1 << int(slab) for slab in np.flatnonzero(whole))
        if landed != self.landed:
            self.landed = landed
            self._changed()

    def write_header(self) -> None:
        """Whose chunk it is; the checksums follow when it is committed."""
        assert self.entry.layout is not None
        assert self.entry.header is not None
        packed = pack_header(self.entry.header, self.entry.layout)
        np.copyto(self.placement.pieces[0], np.frombuffer(packed, np.uint8))

    def committed(self, catalog: Catalog, row: int) -> None:
        """Everybody who reads it holds it from now on."""
        self.landed, self.has_landed = (1 << self.slab_count) - 1, True
        for lease in self.leases:
            if lease.lease_id in lease.session.leases:
                lease.rows += (row,)
                catalog.table.hold(row)
        self._changed()

    def aborted(self) -> None:
        """What was read of it is nothing."""
        self.lost = MissReason.UNAVAILABLE
        self._changed()

    def _changed(self) -> None:
        for listener in self.listeners:
            listener.set()


class Joining:
    """Fetches by the ticket of a store."""

    def __init__(
        self, catalog: Catalog, claiming: Claiming, fetching: Fetching, movement: Movement, counters: Counters
    ) -> None:
        self._catalog = catalog
        self._claiming = claiming
        self._fetching = fetching
        self._movement = movement
        self._counters = counters

    def fetch(
        self, session: Session, reservation: Reservation, layers: frozenset[int], hidden_layers: tuple[int, ...]
    ) -> FetchResult:
        """The chunks of a store in flight, and those that were there before, under a lease: its KV part, and the hidden
        layers that are named. Raises InvalidRequest for one that it does not store; Exhausted where what is cold finds
        no room."""
        parts = _parts(reservation, hidden_layers)
        every = [
            reservation.entries[start + place]
            for start in range(0, len(reservation.entries), reservation.part_count)
            for place in parts
        ]
        for entry in every:
            self._hold_if_stored(entry)
        count = self._chunk_count(every, len(parts))
        entries = every[: count * len(parts)]
        rows = [entry.held for entry in entries if entry.held is not None]
        found, reason = self._movement.bring(rows, frozenset(rows), layers)
        if len(found) < len(rows):
            raise Exhausted(f"the chunks this store continues cannot be brought into memory now: {reason.name}")
        loadings = dict(zip(rows, found, strict=True))
        chunks: list[Resident] = []
        fillings: list[Filling] = []
        for number, entry in enumerate(entries):
            index, part = divmod(number, len(parts))
            chunks.append(self._resident(entry, index, part, loadings, fillings))
        chunks.sort(key=lambda chunk: (chunk.part, chunk.chain_index))
        lease = self._fetching.lease(session, tuple(rows), tuple(chunks))
        for filling in fillings:
            filling.leases.append(lease)
        self._counters.add("fetch_joined_stores")
        return FetchResult(lease.lease_id, count, Tier.DRAM, MissReason.NONE, tuple(chunks), ())

    def _hold_if_stored(self, entry: Entry) -> None:
        """What another store was writing may be there by now."""
        row = entry.namespace.index.get(entry.digest)
        if entry.state is StoreState.PENDING and entry.held is None and row is not None:
            self._catalog.table.hold(row)
            entry.held, entry.state = row, StoreState.PRESENT

    def _chunk_count(self, entries: list[Entry], parts: int) -> int:
        """Leading chunks that are there or being written."""
        for start in range(0, len(entries), parts):
            if not all(self._source(entry) for entry in entries[start : start + parts]):
                return start // parts
        return len(entries) // parts

    def _source(self, entry: Entry) -> Entry | None:
        """Who writes the chunk, if anybody does or did."""
        if entry.state is StoreState.PENDING:
            other = entry.namespace.pending.get(entry.digest)
            return other if isinstance(other, Entry) else None
        return entry if entry.state in (StoreState.WANTED, StoreState.PRESENT, StoreState.COMMITTED) else None

    def _resident(
        self, entry: Entry, index: int, part: int, loadings: dict[int, Loading | None], fillings: list[Filling]
    ) -> Resident:
        table = self._catalog.table
        if entry.held is not None:
            loading = loadings[entry.held]
            placement = loading.placement if loading else self._movement.placement(entry.held)
            return Resident(index, part, table.token_counts[entry.held], placement, loading)
        writer = self._source(entry)
        assert writer is not None
        assert writer.placement is not None
        assert writer.layout is not None
        if writer.filling is None:
            writer.filling = Filling(writer, writer.placement)
            writer.filling.write_header()
            writer.filling.moved()
        fillings.append(writer.filling)
        return Resident(index, part, writer.layout.token_count, writer.placement, writer.filling)


def _parts(reservation: Reservation, hidden_layers: tuple[int, ...]) -> list[int]:
    """Where among a chunk's entries the wanted parts are: the KV, then the hidden layers as they are named."""
    layers = [entry.namespace.layer for entry in reservation.entries[: reservation.part_count]]
    missing = [layer for layer in (None, *hidden_layers) if layer not in layers]
    if missing:
        raise InvalidRequest(f"this store has no {'KV' if missing[0] is None else f'hidden layer {missing[0]}'}")
    return [layers.index(layer) for layer in (None, *hidden_layers)]


def has_filling(chunks: Sequence[Resident]) -> bool:
    """Whether some of a fetch's chunks are still being written."""
    return any(isinstance(chunk.loading, Filling) for chunk in chunks)
