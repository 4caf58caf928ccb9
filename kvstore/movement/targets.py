"""Where chunks are written to: a local tier, whose copies the catalog knows one by one, or a shared one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.catalog import ROOT_ROW, Catalog, Copies
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability
from kvstore.tiers import Residency, UploadState

CLIMB_COUNT_MAX = 512


class Target(Protocol):
    """What takes chunks. A chunk that is *proven* there counts for a promise; one that it *has* need not be written."""

    @property
    def name(self) -> str:
        """The tier's, in settings, logs and counters."""

    @property
    def durability(self) -> Durability:
        """What a chunk has reached that is proven there."""

    @property
    def is_local(self) -> bool:
        """Whether the catalog knows its copies one by one."""

    def has(self, row: int) -> bool:
        """Whether the chunk need not be written."""

    def is_proven(self, row: int) -> bool:
        """Whether what is there is there to stay."""

    def admits(self, row: int) -> bool:
        """Whether the chunk may go there, and is worth its room."""

    def wants(self, row: int) -> bool:
        """Whether it goes there now, as the tier's settings say, though nobody asked for that."""

    async def finds(self, row: int, others: Iterable[int], *, is_proof: bool) -> UploadState:
        """THERE: the tier turns out to have the chunk, which we did not know. ``others``: chunks that wait, of which it
        may be asked, too. ``is_proof``: it is proven there then. Raises Unavailable."""

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        """Raises what the tier raises."""

    def keep(self, row: int, residency: Residency) -> None:
        """What was written is the chunk's copy."""

    def discard(self, row: int, residency: Residency) -> None:
        """Nobody wants what was written: the chunk went, or was stored anew, meanwhile."""


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

    def admits(self, row: int) -> bool:
        return self._copies.policy.admits(self._table.digests[row], *self._catalog.worth(row))

    def wants(self, row: int) -> bool:
        return True

    async def finds(self, row: int, others: Iterable[int], *, is_proof: bool) -> UploadState:
        """FREE: the catalog knows exactly what a local tier has, and nobody else writes there."""
        return UploadState.FREE

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        return await self._copies.tier.write(header, layout, pieces)

    def keep(self, row: int, residency: Residency) -> None:
        """Its ancestors stay more recent than it, as a policy wants it: they may have been written before."""
        table, copies = self._table, self._copies
        copies.put(row, residency)
        copies.policy.stored(row, table.digests[row], *self._catalog.worth(row))
        chain = [row]
        while len(chain) < CLIMB_COUNT_MAX and (parent := table.parents[chain[-1]]) != ROOT_ROW:
            chain.append(parent)
        chain.reverse()
        copies.used([table.digests[each] for each in chain], chain)

    def discard(self, row: int, residency: Residency) -> None:
        """What may be replaced must not be found there later."""
        self._copies.tier.remove([residency], erase=self._catalog.space_of(row).may_be_replaced)
