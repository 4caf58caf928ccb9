"""Reserve: claim the chunks of a chain that a store will write, and allocate room for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from blake3 import blake3

from kvstore.arena import Placement
from kvstore.catalog import Namespace, whole_seconds
from kvstore.chunk import ChunkHeader
from kvstore.chunk.checksum import Checksums
from kvstore.controller.fetches import TICKET_BYTES, namespaces_of
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.stores.filling import Filling
from kvstore.controller.stores.replacement import Replacement
from kvstore.controller.stores.reservation import Entry, Reservation
from kvstore.controller.stores.reservations import Reservations
from kvstore.controller.values import ReserveRequest, StoreResult
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.keys import ROOT_DIGEST, TAILS_BESIDE_MAX
from kvstore.seams import Deadline
from kvstore.spec import Durability, MissReason, StoreState

SHARD_COUNT_MAX = 1024


@dataclass(frozen=True, slots=True)
class _Room:
    """Bounds on making room for chunks. ``keep``: rows that are not evicted. ``patience``: the time that the device may
    take to write chunks that are in the way. ``replaces``: the old value is gone, so the new one is not refused."""

    keep: frozenset[int]
    patience: Deadline
    replaces: bool


class Claims:
    """Makes reservations."""

    def __init__(self, parts: Parts, reservations: Reservations) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._movement = parts.movement
        self._reservations = reservations
        self._replacement = Replacement(parts)
        self.refusal = ""
        """The reason why no chunk is claimed; empty while chunks are."""

    async def reserve(self, session: Session, request: ReserveRequest, deadline: Deadline) -> StoreResult:
        """Claim the chunks of a chain that are neither stored nor being stored. Stops at the first chunk that finds no
        room: a chunk without its parent is of no use. Where only the eviction of unwritten chunks would make room, it
        waits for the device to write them, at most policy.demotion_wait_s and half of the time that its caller waits.
        With a ``refusal`` it stops at the first chunk that is not stored. Raises Exhausted past
        limits.reservation_count_max or limits.namespace_count_max; Unavailable when a value that is to be replaced is
        pinned, or in use for half of the time that its caller waits, or may not be replaced because of a ``refusal``,
        or when the session ends meanwhile."""
        with self._reservations.making(session):
            spaces = self._spaces(request)
            with self._catalog.use(request.query.fingerprint, spaces):
                if not request.replaces:
                    return await self._reserve(session, request, spaces, deadline)
                if self.refusal:
                    raise Unavailable(self.refusal)  # before the old value goes
                patience = deadline.sooner(deadline.answerable_s)  # the old value does not go for a caller who left
                async with self._replacement.removed(spaces[0], request.replaces, patience):
                    return await self._reserve(session, request, spaces, deadline)

    def _spaces(self, request: ReserveRequest) -> list[Namespace]:
        """Return the namespaces of a request's parts. Raises InvalidRequest for a request that contradicts itself."""
        query = request.query
        spec = self._catalog.model(query.fingerprint).spec
        if not query.digests or len(request.token_digests) != len(query.digests):
            raise InvalidRequest("a store names at least one chunk, and one token digest per chunk")
        if not 1 <= request.shards <= SHARD_COUNT_MAX:
            raise InvalidRequest(f"shards {request.shards} must be in 1..{SHARD_COUNT_MAX}")
        if not 0 <= request.tail_token_count < spec.chunk_tokens:
            raise InvalidRequest(f"tail_token_count {request.tail_token_count} must be below {spec.chunk_tokens}")
        spaces = namespaces_of(self._catalog, query, for_store=True)
        if request.durability > Durability.LOCAL and any(space.may_be_replaced for space in spaces):
            raise InvalidRequest(
                f"durability {request.durability.name}: values that may be replaced stay on their node: ask for LOCAL"
            )
        return spaces

    async def _reserve(
        self, session: Session, request: ReserveRequest, spaces: list[Namespace], deadline: Deadline
    ) -> StoreResult:
        """Claim, and register the reservation after the last claim: before that nobody can fill, end or join it."""
        reservation = Reservation(
            next(self._parts.ids),
            [session],
            [],
            len(spaces),
            self._parts.clock.monotonic(),
            fingerprint=request.query.fingerprint,
            shard_count=request.shards,
            ticket=self._parts.random.bytes(TICKET_BYTES),
            use=self._catalog.use(request.query.fingerprint, spaces),
        )
        reservation.want(request.durability)
        # An answer that comes when its caller has gone leaves a reservation that nobody can end.
        patience = deadline.sooner(min(self._parts.policies.demotion_wait_s, deadline.answerable_s))
        try:
            await self._claim_all(reservation, request, spaces, patience)
            headers = [filling.header for filling in reservation.fillings]
            await self._replacement.supersede(spaces[0], request.replaces or (), headers, deadline)
            _check_open(session)
        except BaseException:
            self._reservations.end(reservation)
            raise
        self._reservations.add(reservation)
        beside = islice(_tails_beside(reservation, self._catalog.table.token_counts), TAILS_BESIDE_MAX)
        return replace(reservation.result, tail_lengths=tuple(beside))

    async def _claim_all(
        self, reservation: Reservation, request: ReserveRequest, spaces: list[Namespace], patience: Deadline
    ) -> None:
        digests = request.query.digests
        wanted = set(digests)
        found = [space.index[digest] for space in spaces for digest in digests if digest in space.index]
        await self._movement.checks.prove_all(found, patience.left_s, frozenset(found))
        _check_open(reservation.sessions[0])
        room = _Room(
            frozenset(space.index[digest] for space in spaces for digest in wanted if digest in space.index),
            patience,
            replaces=bool(request.replaces),
        )
        pauses = self._parts.long_work.begin()
        for index, digest in enumerate(digests):
            parent = digests[index - 1] if index else ROOT_DIGEST
            last = index == len(digests) - 1
            tokens = request.tail_token_count if last and request.tail_token_count else spaces[0].spec.chunk_tokens
            for space in spaces:
                await pauses.between()
                _check_open(reservation.sessions[0])
                entry = Entry(space, digest, parent, StoreState.REFUSED)
                reservation.entries.append(entry)
                if not reservation.refusal:
                    position = request.first_position + index * space.spec.chunk_tokens
                    await self._claim(reservation, entry, tokens, position, request.token_digests[index], room)

    async def _claim(
        self, reservation: Reservation, entry: Entry, token_count: int, position: int, token_digest: bytes,
        room: _Room,
    ) -> None:  # fmt: skip
        space = entry.namespace
        layout = space.layout(token_count)
        placement: Placement | None = None
        refusal = "" if room.replaces else self.refusal
        while not self._is_elsewhere(entry) and not refusal:
            is_waiting = self._movement.is_making_room and not room.patience.has_passed
            placement = self._movement.room.allocate(layout.piece_bytes, room.keep, evict_unwritten=not is_waiting)
            if placement is not None or not is_waiting:
                break
            await self._movement.progress(room.patience.left_s)
            _check_open(reservation.sessions[0])
        if entry.state is not StoreState.REFUSED:
            return
        if placement is None:
            reservation.refusal = refusal or (
                "no room: what is left is leased, held or being stored; raise arena.capacity_bytes "
                f"({self._parts.arena.capacity_bytes})"
            )
            self._catalog.depart(space, entry.digest, MissReason.OVERLOADED)
            self._parts.counters.add("store_refused_chunks")
            return
        header = self._header(entry, token_count, position, token_digest, layout.strip_count)
        entry.filling = Filling(layout, header, placement)
        entry.state, entry.ended = StoreState.WANTED, asyncio.get_running_loop().create_future()
        self._reservations.reserved_bytes += placement.byte_count
        self._catalog.claim(space, entry.digest, entry)

    def _is_elsewhere(self, entry: Entry) -> bool:
        """True when the chunk is stored (then it is held until the reservation ends) or another store writes it."""
        space = entry.namespace
        entry.held = space.index.get(entry.digest)
        if entry.held is not None:
            self._catalog.table.hold(entry.held)
            entry.state = StoreState.PRESENT
            return True
        other = space.pending.get(entry.digest)
        if isinstance(other, Entry):
            entry.state, entry.ended = StoreState.PENDING, other.ended
            return True
        return False

    def _header(
        self, entry: Entry, token_count: int, position: int, token_digest: bytes, strip_count: int
    ) -> ChunkHeader:
        space = entry.namespace
        checksums: Checksums = np.zeros((strip_count, 16), np.uint8)
        return ChunkHeader(
            kind=space.kind,
            e_layer=-1 if space.layer is None else space.layer,
            provenance=space.provenance,
            exactness=space.exactness,
            token_count=token_count,
            namespace=space.fingerprint,
            fingerprint=space.fingerprint,
            storage_key=self._movement.names.key(space, entry.digest),
            parent=entry.parent,
            chain_digest=entry.digest,
            token_digest=token_digest,
            tenant_digest=self._parts.keys.digest,
            first_position=position,
            rope_digest=blake3(repr(space.spec.rope).encode()).digest(16),
            write_id=self._parts.random.bytes(16),
            checksums=checksums,
            stored_s=whole_seconds(self._parts.clock.wall()),
        )


def _check_open(session: Session) -> None:
    """Raises Unavailable when the session ended while its call waited: nobody could free what it claims after that."""
    if not session.is_open:
        raise Unavailable("the session ended while its store was being reserved")


def _tails_beside(reservation: Reservation, token_counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Give the wanted chunks that have partial chunks beside them: the chunk's index in the chain, and the lengths of
    the partial chunks as a bitmap."""
    entries = reservation.entries[:: reservation.part_count]
    for index, entry in enumerate(entries):
        tails = entry.namespace.tails
        if entry.state is StoreState.WANTED and entry.parent in tails:
            yield index, tails.bits(entry.parent, token_counts)
