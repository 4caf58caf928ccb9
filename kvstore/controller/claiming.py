"""Claiming a chain's chunks: who stores which, and where they will lie."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from blake3 import blake3

from kvstore.arena import Arena, Placement
from kvstore.catalog import Catalog, Namespace
from kvstore.chunk import ChunkHeader, write_mark
from kvstore.chunk.checksum import Checksums
from kvstore.config import LimitSettings
from kvstore.controller.fetching import parts_of
from kvstore.controller.reservation import Entry, Reservation
from kvstore.controller.sessions import Session, Sessions
from kvstore.controller.tickets import TICKET_BYTES
from kvstore.controller.values import ReserveRequest, StoreResult
from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.keys import ROOT_DIGEST, storage_key
from kvstore.movement import Movement
from kvstore.seams import Clock, LongWork, Random, TenantKeys
from kvstore.spec import CacheKind, MissReason, StoreState
from kvstore.telemetry import Counters
from kvstore.tiers import NOTHING

SHARD_COUNT_MAX = 1024
REPLACE_STEP_S = 0.005
TAILS_BESIDE_MAX = 64
"""Of how many chunks of a store its writer is told what partial chunks are beside them: at most 8 KiB each."""


class Claiming:
    """Makes reservations. ``end`` frees one that could not be made whole."""

    def __init__(
        self,
        *,
        arena: Arena,
        catalog: Catalog,
        movement: Movement,
        sessions: Sessions,
        limits: LimitSettings,
        clock: Clock,
        random: Random,
        keys: TenantKeys,
        counters: Counters,
        demotion_wait_s: float,
        deadline_s: float,
    ) -> None:
        self._movement = movement
        self._deadline_s = deadline_s
        self._arena = arena
        self._catalog = catalog
        self._sessions = sessions
        self._limits = limits
        self._clock = clock
        self._random = random
        self._keys = keys
        self._counters = counters
        self._demotion_wait_s = demotion_wait_s
        self.end: Callable[[Reservation], None] = _nothing
        self._by_ticket: dict[bytes, Reservation] = {}
        self._long = LongWork(clock)
        self.reserved_bytes = 0

    async def reserve(self, session: Session, request: ReserveRequest) -> StoreResult:
        """Claim the chunks of a chain that nobody has or is storing. Stops at the first that finds no room: a
        chunk without its parent is of no use. Where only unwritten chunks could make room it waits for the device,
        at most policy.demotion_wait_s. Raises Exhausted past limits.reservation_count_max or
        limits.namespace_count_max."""
        query = request.query
        spec = self._catalog.model(query.fingerprint).spec
        self._check_count(session)
        if not query.digests or len(request.token_digests) != len(query.digests):
            raise InvalidRequest("a store names at least one chunk, and one token digest per chunk")
        if not 1 <= request.shards <= SHARD_COUNT_MAX:
            raise InvalidRequest(f"shards {request.shards} must be in 1..{SHARD_COUNT_MAX}")
        if not 0 <= request.tail_token_count < spec.chunk_tokens:
            raise InvalidRequest(f"tail_token_count {request.tail_token_count} must be below {spec.chunk_tokens}")
        parts = parts_of(self._catalog, query, for_store=True)
        session.claiming += 1
        try:
            if request.replaces:
                await self._replace(parts[0], request.replaces)
            return await self._reserve(session, request, parts)
        finally:
            session.claiming -= 1

    async def _reserve(self, session: Session, request: ReserveRequest, parts: list[Namespace]) -> StoreResult:
        """Nobody knows of the reservation before all of it is claimed: nobody can fill, end or join it."""
        reservation = Reservation(
            self._sessions.next_id(),
            [session],
            [],
            len(parts),
            self._clock.monotonic(),
            fingerprint=request.query.fingerprint,
            shard_count=request.shards,
            ticket=self._random.bytes(TICKET_BYTES),
        )
        try:
            await self._claim_all(reservation, request, parts)
            await self._supersede(reservation, parts[0], request.replaces or ())
            _check_open(session)
        except BaseException:
            self.end(reservation)
            raise
        session.reservations[reservation.reservation_id] = reservation
        self._by_ticket[reservation.ticket] = reservation
        self._counters.add("store_reservations")
        beside = islice(_tails_beside(reservation, self._catalog.table.token_counts), TAILS_BESIDE_MAX)
        return replace(_told(reservation), tail_lengths=tuple(beside))

    async def _replace(self, part: Namespace, digests: Sequence[bytes]) -> None:
        """Remove what is stored under these digests. Who reads or stores it is waited for. Raises InvalidRequest where
        a digest has one meaning for ever; Unavailable when they do not end within the deadline."""
        if part.kind is not CacheKind.OPAQUE:
            raise InvalidRequest("replaces: only chunks of an opaque namespace can be replaced")
        until_s = self._clock.monotonic() + self._deadline_s
        while True:
            busy = next((each for each in digests if self._is_in_use(part, each)), None)
            if busy is None:
                for row in [part.index[each] for each in digests if each in part.index]:
                    self._movement.remove(row, MissReason.STALE)
                return  # and the claim follows without a pause
            while self._is_in_use(part, busy):  # one name is looked at while it is waited for, however many there are
                if self._clock.monotonic() >= until_s:
                    raise Unavailable("the value that is to be replaced is being read or written: try again")
                await self._clock.sleep(REPLACE_STEP_S)

    def _is_in_use(self, part: Namespace, digest: bytes) -> bool:
        """Whether a chunk is being read or stored."""
        row = part.index.get(digest)
        return digest in part.pending or (row is not None and self._catalog.table.is_held(row))

    async def _supersede(self, reservation: Reservation, part: Namespace, replaced: Sequence[bytes]) -> None:
        """Nobody may fill what is claimed before nothing older can come back in its place. Raises KVStoreError."""
        if part.kind is not CacheKind.OPAQUE:
            return
        writes = dict.fromkeys((self._storage_key(part, digest) for digest in replaced), NOTHING)
        headers = (entry.header for entry in reservation.entries if entry.header is not None)
        writes.update((header.storage_key, write_mark(header.write_id)) for header in headers)
        await self._movement.supersede(writes, self._deadline_s)

    def _storage_key(self, part: Namespace, digest: bytes) -> bytes:
        return storage_key(self._keys.secret, part.fingerprint, part.provenance, part.exactness, digest)

    def join(self, session: Session, ticket: bytes, fingerprint: bytes) -> StoreResult:
        """Another process writes some shards of a store. Raises InvalidRequest for a store that ended, or of another
        model; Exhausted past limits.reservation_count_max."""
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
            session.reservations[reservation.reservation_id] = reservation
        return _told(reservation)

    def by_ticket(self, ticket: bytes) -> Reservation | None:
        """The store in flight that a ticket names."""
        return self._by_ticket.get(ticket)

    def forget(self, reservation: Reservation) -> None:
        """Nobody joins it any more."""
        self._by_ticket.pop(reservation.ticket, None)

    def _check_count(self, session: Session) -> None:
        count = len(session.reservations) + session.claiming
        if count >= self._limits.reservation_count_max:
            raise Exhausted(f"this session holds {count} reservations: raise limits.reservation_count_max")

    async def _claim_all(self, reservation: Reservation, request: ReserveRequest, parts: list[Namespace]) -> None:
        digests = request.query.digests
        wanted = set(digests)
        found = [part.index[digest] for part in parts for digest in digests if digest in part.index]
        await self._movement.prove(found, self._demotion_wait_s)
        _check_open(reservation.sessions[0])
        keep = frozenset(part.index[digest] for part in parts for digest in wanted if digest in part.index)
        pauses = self._long.begin()
        for index, digest in enumerate(digests):
            parent = digests[index - 1] if index else ROOT_DIGEST
            last = index == len(digests) - 1
            tokens = request.tail_token_count if last and request.tail_token_count else parts[0].spec.chunk_tokens
            for part in parts:
                await pauses.between()
                _check_open(reservation.sessions[0])
                entry = Entry(part, digest, parent, StoreState.REFUSED)
                reservation.entries.append(entry)
                if not reservation.refusal:
                    position = request.first_position + index * part.spec.chunk_tokens
                    await self._claim(reservation, entry, tokens, position, request.token_digests[index], keep)

    async def _claim(
        self, reservation: Reservation, entry: Entry, token_count: int, position: int, token_digest: bytes,
        keep: frozenset[int],
    ) -> None:  # fmt: skip
        part = entry.namespace
        layout = part.layout(token_count)
        placement: Placement | None = None
        while not self._is_elsewhere(entry):
            is_waiting = self._may_wait(reservation)
            placement = self._movement.allocate(layout.piece_bytes, keep, evict_unwritten=not is_waiting)
            if placement is not None or not is_waiting:
                break
            await self._movement.progress(self._demotion_wait_s)
            _check_open(reservation.sessions[0])
        if entry.state is not StoreState.REFUSED:
            return
        if placement is None:
            reservation.refusal = (
                "no room: what is left is pinned, leased or being stored; raise arena.capacity_bytes "
                f"({self._arena.capacity_bytes})"
            )
            self._catalog.depart(part, entry.digest, MissReason.OVERLOADED)
            self._counters.add("store_refused_chunks")
            return
        self.reserved_bytes += placement.byte_count
        entry.state, entry.layout, entry.placement = StoreState.WANTED, layout, placement
        entry.ended = asyncio.get_running_loop().create_future()
        entry.claimed, entry.filled = np.zeros((2, layout.strip_count), np.bool_)
        entry.header = self._header(entry, token_count, position, token_digest, layout.strip_count)
        self._catalog.claim(part, entry.digest, entry)

    def _is_elsewhere(self, entry: Entry) -> bool:
        """Whether the chunk is resident (then it is kept until the reservation ends) or another's store in flight."""
        part = entry.namespace
        entry.held = part.index.get(entry.digest)
        if entry.held is not None:
            self._catalog.table.hold(entry.held)
            entry.state = StoreState.PRESENT
            return True
        other = part.pending.get(entry.digest)
        if isinstance(other, Entry):
            entry.state, entry.ended = StoreState.PENDING, other.ended
            return True
        return False

    def _may_wait(self, reservation: Reservation) -> bool:
        """Whether the device may soon have taken what is in the way."""
        waited_s = self._clock.monotonic() - reservation.born_s
        return self._movement.is_making_room and waited_s < self._demotion_wait_s

    def _header(
        self, entry: Entry, token_count: int, position: int, token_digest: bytes, strip_count: int
    ) -> ChunkHeader:
        part = entry.namespace
        checksums: Checksums = np.zeros((strip_count, 16), np.uint8)
        return ChunkHeader(
            kind=part.kind,
            e_layer=-1 if part.layer is None else part.layer,
            provenance=part.provenance,
            exactness=part.exactness,
            token_count=token_count,
            namespace=part.fingerprint,
            fingerprint=part.fingerprint,
            storage_key=self._storage_key(part, entry.digest),
            parent=entry.parent,
            chain_digest=entry.digest,
            token_digest=token_digest,
            tenant_digest=self._keys.digest,
            first_position=position,
            rope_digest=blake3(repr(part.spec.rope).encode()).digest(16),
            write_id=self._random.bytes(16),
            checksums=checksums,
        )


def _check_open(session: Session) -> None:
    """A session may end while its call waits; what it would claim then, nobody could give back."""
    if not session.is_open:
        raise Unavailable("the session ended while its store was being reserved")


def _told(reservation: Reservation) -> StoreResult:
    states = tuple(entry.state for entry in reservation.entries)
    return StoreResult(reservation.reservation_id, states, refusal=reservation.refusal, ticket=reservation.ticket)


def _tails_beside(reservation: Reservation, token_counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Of each wanted chunk that has any: its place in the chain, and which lengths the partial chunks beside it have.
    The first TAILS_BESIDE_MAX: what more there is, nobody has named as superseded."""
    entries = reservation.entries[:: reservation.part_count]
    for index, entry in enumerate(entries):
        tails = entry.namespace.tails
        if entry.state is StoreState.WANTED and entry.parent in tails:
            yield index, tails.bits(entry.parent, token_counts)


def _nothing(_: Reservation) -> None:
    return None
