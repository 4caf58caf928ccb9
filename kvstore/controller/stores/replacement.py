"""The older value of an opaque name goes before a newer one is stored."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from kvstore.catalog import ROOT_ROW, Namespace
from kvstore.chunk import ChunkHeader, write_mark
from kvstore.controller.parts import Parts
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.seams import Deadline
from kvstore.spec import CacheKind, MissReason
from kvstore.tiers import NOTHING

STEP_S = 0.005


class Replacement:
    """Removes the chunks that a store replaces, from every tier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._replacing: set[tuple[Namespace, bytes]] = set()
        """Digests of values that are gone for newer ones, which may still wait for room, and are not claimed then."""

    @asynccontextmanager
    async def removed(self, space: Namespace, digests: Sequence[bytes], deadline: Deadline) -> AsyncIterator[None]:
        """Remove the chunks as ``remove`` does, and let no other store remove them before the end: a key has two names,
        and the values of both stores would stay."""
        await self.remove(space, digests, deadline)
        names = {(space, each) for each in digests}
        self._replacing |= names  # at once: ``remove`` saw that no other store has them
        try:
            yield
        finally:
            self._replacing -= names

    async def remove(self, space: Namespace, digests: Sequence[bytes], deadline: Deadline) -> None:
        """Remove the chunks of these digests, once nobody reads or stores them; leases that are too old do not count.
        What hangs on them has names that nobody asks for any more: it goes first when room is needed. Raises
        InvalidRequest for a namespace whose digests have one meaning for ever; Unavailable when reads or stores do not
        end within the deadline, and at once where a chunk is pinned."""
        if space.kind is not CacheKind.OPAQUE:
            raise InvalidRequest("replaces: only chunks of an opaque namespace can be replaced")
        while True:
            busy = next((each for each in digests if self._is_in_use(space, each)), None)
            if busy is None:
                rows = [space.index[each] for each in digests if each in space.index]
                for row in self._parts.catalog.below(space, rows):
                    self._parts.movement.goes_first(row)
                for row in rows:
                    self._parts.movement.removal.remove(row, MissReason.STALE)
                return
            if self._parts.pins.is_kept(space.index.get(busy, ROOT_ROW)):
                raise Unavailable("the value that is to be replaced is pinned: kvstore unpin ends that")
            self._parts.leases.revoke_stale()  # a reader that stands still would keep the value for ever
            while self._is_in_use(space, busy):  # only this digest is checked while waiting: there may be many
                if deadline.has_passed:
                    raise Unavailable("the value that is to be replaced is being read or written: try again")
                await self._parts.clock.sleep(STEP_S)

    def _is_in_use(self, space: Namespace, digest: bytes) -> bool:
        """True when the digest's chunk is being read, stored or replaced."""
        if digest in space.pending or (space, digest) in self._replacing:
            return True
        row = space.index.get(digest)
        return row is not None and self._parts.catalog.table.is_held(row)

    async def supersede(
        self, space: Namespace, replaced: Sequence[bytes], headers: Iterable[ChunkHeader], deadline: Deadline
    ) -> None:
        """Ensure that no tier can bring back an older value of the chunks of ``headers``, or any value of the digests
        ``replaced``. Only after this may the claimed chunks be filled. Raises KVStoreError."""
        if space.kind is not CacheKind.OPAQUE:
            return
        names = self._parts.movement.names
        writes = dict.fromkeys((names.key(space, digest) for digest in replaced), NOTHING)
        writes.update((header.storage_key, write_mark(header.write_id)) for header in headers)
        await self._parts.movement.supersede(writes, deadline.left_s)
