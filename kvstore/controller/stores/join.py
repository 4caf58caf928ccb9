"""Fetches of a store in flight: its layers as they are filled, provisional until it is committed."""

from __future__ import annotations

from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.stores.filling import Filling
from kvstore.controller.stores.reservation import Entry, Reservation
from kvstore.controller.values import FetchResult, Resident
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.movement import Loading
from kvstore.spec import MissReason, StoreState, Tier


class Joins:
    """Fetches by the ticket of a store."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._movement = parts.movement

    def fetch(
        self, session: Session, reservation: Reservation, layers: frozenset[int], hidden_layers: tuple[int, ...]
    ) -> FetchResult:
        """Lease the chunks of a store in flight, and those of its chain that were stored before: their KV part, and the
        E of ``hidden_layers``. Raises InvalidRequest for a part that the store does not have; Exhausted where memory
        has no room for chunks that are not in memory."""
        places = _places(reservation, hidden_layers)
        every = [
            reservation.entries[start + place]
            for start in range(0, len(reservation.entries), reservation.part_count)
            for place in places
        ]
        for entry in every:
            self._hold_if_stored(entry)
        count = self._chunk_count(every, len(places))
        entries = every[: count * len(places)]
        rows = [entry.held for entry in entries if entry.held is not None]
        found, reason = self._movement.loads.begin(rows, frozenset(rows), layers)
        if len(found) < len(rows):
            raise Exhausted(f"the chunks this store continues cannot be brought into memory now: {reason.name}")
        loadings = dict(zip(rows, found, strict=True))
        chunks: list[Resident] = []
        fillings: list[Filling] = []
        for number, entry in enumerate(entries):
            index, part = divmod(number, len(places))
            chunks.append(self._resident(entry, index, part, loadings, fillings))
        chunks.sort(key=lambda chunk: (chunk.part, chunk.chain_index))
        lease = self._parts.leases.grant(session, tuple(rows), sum(chunk.placement.byte_count for chunk in chunks))
        for filling in fillings:
            filling.leases.append(lease)
        self._parts.counters.add("fetch_joined_stores")
        return FetchResult(
            lease.lease_id, count, Tier.DRAM, MissReason.NONE, tuple(chunks), (), is_joined=bool(fillings)
        )

    def _hold_if_stored(self, entry: Entry) -> None:
        """Hold the chunk if another store was writing it and has published it by now."""
        row = entry.namespace.index.get(entry.digest)
        if entry.state is StoreState.PENDING and entry.held is None and row is not None:
            self._catalog.table.hold(row)
            entry.held, entry.state = row, StoreState.PRESENT

    def _chunk_count(self, entries: list[Entry], part_count: int) -> int:
        """Count the leading chunks that are stored or being written."""
        for start in range(0, len(entries), part_count):
            if not all(self._source(entry) for entry in entries[start : start + part_count]):
                return start // part_count
        return len(entries) // part_count

    def _source(self, entry: Entry) -> Entry | None:
        """Return the entry that has the chunk, or that its writer fills; None: the chunk is neither stored nor being
        written."""
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
            placement = loading.placement if loading else self._movement.memory.placement(entry.held)
            return Resident(index, part, table.token_counts[entry.held], placement, loading)
        writer = self._source(entry)
        assert writer is not None
        assert writer.filling is not None
        writer.filling.read()
        fillings.append(writer.filling)
        return Resident(index, part, writer.filling.layout.token_count, writer.filling.placement, writer.filling)


def _places(reservation: Reservation, hidden_layers: tuple[int, ...]) -> list[int]:
    """Return the indices of the wanted parts among a chunk's entries: the KV first, then the hidden layers in the order
    asked for. Raises InvalidRequest for a part that the store does not have."""
    layers = [entry.namespace.layer for entry in reservation.entries[: reservation.part_count]]
    missing = [layer for layer in (None, *hidden_layers) if layer not in layers]
    if missing:
        raise InvalidRequest(f"this store has no {'KV' if missing[0] is None else f'hidden layer {missing[0]}'}")
    return [layers.index(layer) for layer in (None, *hidden_layers)]
