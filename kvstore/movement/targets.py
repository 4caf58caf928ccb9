"""The targets of writes: a local tier, whose copies the catalog knows one by one, or a shared tier."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.catalog import ROOT_ROW, Catalog, Copies
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability
from kvstore.tiers import Residency, UploadState

CLIMB_COUNT_MAX = 512


class MoveTarget(Protocol):
    """A tier that takes chunks. A promise may rest on a chunk that is *proven* there; a chunk that the tier *has* need
    not be written."""

    @property
    def name(self) -> str:
        """The tier's name in settings, logs and counters."""

    @property
    def durability(self) -> Durability:
        """The level that a chunk has reached when it is proven there."""

    @property
    def is_local(self) -> bool:
        """True when the catalog knows the tier's copies one by one."""

    def has(self, row: int) -> bool:
        """Return True when the chunk need not be written."""

    def is_proven(self, row: int) -> bool:
        """Return True when a promise may rest on the copy there."""

    async def confirm(self, rows: Sequence[int]) -> None:
        """Ask anew for chunks whose last copy on the node is to be given up for the one there. A chunk of which the
        tier does not say that it has it is proven no more."""

    def admits(self, row: int) -> bool:
        """Return True when the chunk may go there, and is worth its room."""

    def wants(self, row: int) -> bool:
        """Return True when the tier's settings send the chunk there now, without any request for that."""

    async def finds(self, row: int, others: Iterable[int], *, is_proof: bool) -> UploadState:
        """Look for the chunk in the tier before it is written. THERE: the tier turns out to have it, which we did not
        know. ``others``: waiting chunks that the same question may ask for, too. ``is_proof``: THERE only if the chunk
        is proven there. Raises Unavailable."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        """Write a chunk to the tier. Raises the tier's errors."""

    def keep(self, row: int, residency: Residency) -> None:
        """Make the bytes that were written the chunk's copy."""

    def discard(self, row: int, residency: Residency) -> None:
        """Give up the bytes that were written: the chunk left, or was stored anew, meanwhile."""


class LocalTarget:
    """A local tier as a target."""

    is_local = True

    def __init__(self, catalog: Catalog, copies: Copies) -> None:
        self._catalog = catalog
        self._table = catalog.table
        self._copies = copies
        self.name = copies.tier.name
        self.durability = copies.durability

    def has(self, row: int) -> bool:
        return row in self._copies

    def is_proven(self, row: int) -> bool:
        return self._copies.is_proven(row)

    async def confirm(self, rows: Sequence[int]) -> None:
        """Do nothing: the catalog knows exactly what a local tier has."""

    def admits(self, row: int) -> bool:
        byte_count, cost = self._catalog.worth(row)
        # 0: a chunk of an earlier life, whose layout is not known before its model is registered
        return byte_count > 0 and self._copies.policy.admits(self._table.digests[row], byte_count, cost)

    def wants(self, row: int) -> bool:
        return True

    async def finds(self, row: int, others: Iterable[int], *, is_proof: bool) -> UploadState:
        """Return FREE: the catalog knows exactly what a local tier has, and no other node writes there."""
        return UploadState.FREE

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        return await self._copies.tier.write(header, layout, pieces)

    def keep(self, row: int, residency: Residency) -> None:
        """Record the copy. Its ancestors stay more recent than the chunk, as a policy wants it: they may have been
        written before."""
        table, copies = self._table, self._copies
        copies.put(row, residency)
        copies.policy.stored(row, table.digests[row], *self._catalog.worth(row))
        chain = [row]
        while len(chain) < CLIMB_COUNT_MAX and (parent := table.parents[chain[-1]]) != ROOT_ROW:
            chain.append(parent)
        chain.reverse()
        copies.used([table.digests[each] for each in chain], chain)

    def discard(self, row: int, residency: Residency) -> None:
        """Remove the bytes. A value that may be replaced is erased: it must not be found there later."""
        self._copies.tier.remove([residency], erase=self._catalog.space_of(row).may_be_replaced)
