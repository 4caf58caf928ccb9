"""The sources of loads: a local tier's copy of a chunk, or a copy that a shared tier perhaps has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.catalog import Catalog, Copies
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DataLoss, KVStoreError
from kvstore.movement.removal import Removal
from kvstore.seams.memory import Bytes
from kvstore.spec import Tier
from kvstore.tiers import ChunkName, StoredChunk

STALL_S = 2.0
"""A tier that has left a request unanswered for so many seconds gets no new ones on a reader's behalf; a shared
tier gets none at all."""
WENT = frozenset({"gone", "absent", "replaced"})
"""The reasons of a DataLoss that is no damage: a shared tier has the chunk no more, or has another write of it."""


class ChunkSource(Protocol):
    """One chunk in one tier."""

    @property
    def name(self) -> str:
        """The tier's name in settings, logs and counters."""

    @property
    def kind(self) -> Tier:
        """The tier's kind in replies."""

    @property
    def rank(self) -> int:
        """The position of the tier: larger for slower tiers."""

    @property
    def patience_s(self) -> float | None:
        """Seconds that a reader waits for one answer of the tier; None: as long as the reader likes."""

    @property
    def is_stalled(self) -> bool:
        """True while the tier answers nothing, and readers wait for it all the same."""

    @property
    def piece_bytes_max(self) -> int:
        """See ``SharedUse``; 0 for a local tier."""

    async def open(self, ahead: Sequence[Bytes]) -> StoredChunk | None:
        """Open the chunk; None when it is not there any more. ``ahead``: see ``SharedTier.open``. Raises the tier's
        errors."""

    def is_current(self, header: ChunkHeader) -> bool:
        """Return True when the copy that was read is still the chunk. It may have left, or been stored anew,
        meanwhile."""

    def worked(self) -> None:
        """Record that the whole chunk was read."""

    async def failed(self, error: KVStoreError) -> None:
        """Record the error of a call of this source."""

    def late(self) -> float:
        """Called when a call takes longer than readers wait. Return how many seconds more they wait, because the tier
        answers other calls; 0: no longer."""


class LocalSource:
    """A copy that the catalog knows. A copy that fails its check is given up."""

    patience_s = None
    piece_bytes_max = 0

    def __init__(self, copies: Copies, row: int, chunk: ChunkName, rank: int, removal: Removal) -> None:
        self.name, self.kind, self.rank = copies.tier.name, copies.kind, rank
        self._copies = copies
        self._row = row
        self._chunk = chunk
        self._removal = removal
        self._residency = copies.residency(row)

    @property
    def is_stalled(self) -> bool:
        return self._copies.tier.stalled_s() > STALL_S

    async def open(self, ahead: Sequence[Bytes]) -> StoredChunk | None:
        return await self._copies.tier.open(self._chunk, self._residency)

    def is_current(self, header: ChunkHeader) -> bool:
        return self._copies.residency(self._row) == self._residency

    def worked(self) -> None:
        pass

    async def failed(self, error: KVStoreError) -> None:
        if isinstance(error, DataLoss):
            await self._removal.quarantine(self._copies, self._row, self._residency)

    def late(self) -> float:
        return 0.0


async def check_whole(stored: StoredChunk, layout: ChunkLayout) -> None:
    """Check every strip of an opened copy, a slab at a time, and close it. Raises DataLoss; the tier's errors."""
    try:
        for slab in range(len(layout.slabs)):
            await stored.check(range(slab, slab + 1))
    finally:
        stored.close()


def may_enter(catalog: Catalog, row: int, mark: int, known_mark: int | None) -> bool:
    """Return True when a chunk that came from beyond the node may be entered in this row, by the mark of its write. If
    the node had the chunk when the read began, it must still have that write; if not, no store of it may be pending."""
    table, space = catalog.table, catalog.space_of(row)
    if table.is_resident(row):
        return known_mark == mark == table.write_marks[row]
    return known_mark is None and table.digests[row] not in space.pending
