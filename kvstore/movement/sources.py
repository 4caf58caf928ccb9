"""Where a load reads a chunk from: a local tier's copy, or what a shared tier perhaps has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvstore.catalog import Catalog, Copies
from kvstore.chunk import ChunkHeader
from kvstore.errors import DataLoss, KVStoreError
from kvstore.movement.removal import Removal
from kvstore.seams.memory import Bytes
from kvstore.spec import Tier
from kvstore.tiers import ChunkName, StoredChunk

WENT = frozenset({"gone", "absent", "replaced"})
"""The reasons of a DataLoss that is no damage: a shared tier has the chunk no more, or has another write of it."""


class Source(Protocol):
    """One chunk in one tier."""

    @property
    def name(self) -> str:
        """The tier's, in settings, logs and counters."""

    @property
    def kind(self) -> Tier:
        """What replies call the tier."""

    @property
    def rank(self) -> int:
        """Larger for slower tiers."""

    @property
    def patience_s(self) -> float | None:
        """How long a reader is kept waiting for one answer of the tier; None: as long as the reader waits."""

    async def open(self, ahead: Sequence[Bytes]) -> StoredChunk | None:
        """None: it is not there any more. ``ahead``: see ``SharedTier.open``. Raises what the tier raises."""

    def is_current(self, header: ChunkHeader) -> bool:
        """Whether what was read is the chunk still. It may have gone, or was stored anew, meanwhile."""

    def worked(self) -> None:
        """Take note that all of it was read."""

    async def failed(self, error: KVStoreError) -> None:
        """Take note of what a call of it raised."""

    def late(self) -> float:
        """A call of it takes longer than readers are kept waiting. For how many seconds more they are, because the tier
        answers others; 0: no longer."""


class LocalSource:
    """A copy that the catalog knows. One that fails its check is given up."""

    patience_s = None

    def __init__(self, copies: Copies, row: int, chunk: ChunkName, rank: int, removal: Removal) -> None:
        self.name, self.kind, self.rank = copies.tier.name, copies.kind, rank
        self._copies = copies
        self._row = row
        self._chunk = chunk
        self._removal = removal
        self._residency = copies.residency(row)

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


def may_enter(catalog: Catalog, row: int, mark: int, known_mark: int | None) -> bool:
    """Whether a chunk that came from beyond the node may be this row's, by the mark of its write. Where the node had it
    when it was asked for, it still has that write; where not, nobody stores it."""
    table, space = catalog.table, catalog.space_of(row)
    if table.is_resident(row):
        return known_mark == mark == table.write_marks[row]
    return known_mark is None and table.digests[row] not in space.pending
