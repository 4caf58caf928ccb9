"""A shared tier as the source of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.catalog import Catalog
from kvstore.chunk import ChunkHeader, write_mark
from kvstore.errors import DataLoss, KVStoreError
from kvstore.movement.names import ChunkNames
from kvstore.movement.shared import SharedCopies
from kvstore.movement.sources import STALL_S, may_enter
from kvstore.seams.memory import Bytes
from kvstore.tiers import ChunkName, StoredChunk

REARM_S_MIN = 0.1


class SharedSource:
    """A chunk that a shared tier is said to have."""

    patience_s = STALL_S
    is_stalled = False
    """Readers are told when the tier answers nothing: what they wait for is lost then."""

    def __init__(
        self,
        shared: SharedCopies,
        row: int,
        chunk: ChunkName,
        catalog: Catalog,
        names: ChunkNames,
        was_wrong: Callable[[bytes, SharedCopies], None],
    ) -> None:
        """``was_wrong``: called with the chunk's storage key where the tier does not have it, or not whole."""
        self.name, self.kind, self.rank = shared.tier.name, shared.tier.kind, shared.rank
        self.piece_bytes_max = shared.piece_bytes_max
        self._shared = shared
        self._row = row
        self._chunk = chunk
        self._catalog = catalog
        self._names = names
        self._was_wrong = was_wrong

    async def open(self, ahead: Sequence[Bytes]) -> StoredChunk | None:
        try:
            found = await self._shared.tier.open(self._chunk, ahead)
        except DataLoss as error:
            if error.fields.get("reason") != "write id":
                raise
            # another node's write, and not damaged: a device that does not answer has the one that the catalog knows
            raise DataLoss(error.message, reason="replaced") from error
        if found is None:
            self._forget()
        elif not self._names.fits(self._row, found.header):
            found.close()
            raise DataLoss("another chunk lies where this one should", reason="header")
        return found

    def is_current(self, header: ChunkHeader) -> bool:
        return may_enter(self._catalog, self._row, write_mark(header.write_id), self._chunk.mark)

    def worked(self) -> None:
        self._shared.worked()
        self._shared.see(self._row)
        self._shared.bad.pop(self._chunk.storage_key, None)

    async def failed(self, error: KVStoreError) -> None:
        """Record the error. A copy that failed its check is written anew when the chunk is stored again."""
        if isinstance(error, DataLoss):
            self._shared.is_bad(self._chunk.storage_key)
            self._forget()
        else:
            self._shared.failed(error, error.message)

    def late(self) -> float:
        """Wait longer for a tier that answers other calls meanwhile: it is busy."""
        more_s = self.patience_s - self._shared.tier.stalled_s()
        if more_s >= REARM_S_MIN:
            return more_s
        self._shared.breaker.failed(f"tiers.{self.name} has not answered for {self.patience_s:.0f} s")
        return 0.0

    def _forget(self) -> None:
        self._shared.take(self._row)
        self._was_wrong(self._chunk.storage_key, self._shared)
