"""The DRAM tier: chunks in extents of the arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import Arena, Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, StripRun, are_right, parse_header, slab_runs, strip_run, wrong_slabs
from kvstore.errors import DataLoss, Exhausted, InvalidRequest, KVStoreError
from kvstore.seams import Workers
from kvstore.seams.jobs import done
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Encoding, Tier
from kvstore.tiers.contract import (
    Buffer,
    ChunkName,
    Evictor,
    IndexColumns,
    Recovered,
    Residency,
    TierStatistics,
    check_header,
    host_memory,
)


class DramTier:
    """Copies into and out of extents of the arena. A residency is a generation slot. ``workers`` move the bytes.

    Two calls are beyond the contract, and only the owner of the mapped tier uses them. Stores and loads put their bytes
    into extents themselves, before it is known whether the chunk will be whole: ``adopt`` makes such an extent a copy
    of this tier without moving a byte. A client reads a copy without a call, from the extents that ``placement``
    returns.
    """

    name = "dram"
    kind = Tier.DRAM
    durability = Durability.MEMORY

    def __init__(self, arena: Arena, workers: Workers) -> None:
        self._arena = arena
        self._workers = workers
        self._evictor: Evictor | None = None
        self._placements: dict[Residency, Placement] = {}
        self._readers: dict[Residency, int] = {}
        self._leaving: dict[Residency, Placement] = {}
        """Copies that were given up while a reader had them open."""
        self._read_bytes = self._written_bytes = 0

    async def recover(self, evictor: Evictor) -> Recovered:
        """Return no copies: memory keeps nothing over a start."""
        self._evictor = evictor
        return Recovered(IndexColumns(), np.empty(0, np.bool_))

    async def close(self, held: Recovered | None) -> None:
        """Do nothing: the arena and its mappings end with their owner."""

    # ------------------------------------------------------------ copies come

    def adopt(self, placement: Placement) -> Residency:
        """Make extents that hold a whole chunk a copy of this tier. From here on they are the tier's: ``remove`` frees
        them. Bytes that the caller moved are not counted as written."""
        assert placement.slot not in self._placements, "adopted twice"
        self._placements[placement.slot] = placement
        return placement.slot

    def placement(self, residency: Residency) -> Placement:
        """Return the placement of a copy. Raises KeyError for a copy that is not there: callers know that it is."""
        return self._placements[residency]

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        source = host_memory(pieces)
        placement = self._allocate(layout.piece_bytes)
        try:
            await done(self._workers, copy_pieces, source, list(placement.pieces))
        except BaseException:
            self._arena.free(placement)
            raise
        self._written_bytes += placement.byte_count
        return self.adopt(placement)

    def _allocate(self, piece_bytes: tuple[int, ...]) -> Placement:
        """Return room for a chunk; other copies go for it. Raises Exhausted."""
        try:
            found = self._arena.allocate(piece_bytes)
        except InvalidRequest as error:
            raise Exhausted(error.message) from error

        def enough() -> bool:
            nonlocal found
            found = self._arena.allocate(piece_bytes)
            return found is not None

        if found is None and self._evictor is not None:
            self._evictor.evict(lambda _: True, enough)
        if found is None:
            raise Exhausted("the arena is full: raise arena.capacity_bytes")
        return found

    def has_room(self, layout: ChunkLayout) -> bool:
        """See ``LocalTier.has_room``. Only a trial allocation tells whether the free bytes are in large enough pieces,
        and whether the machine has them."""
        try:
            found = self._arena.allocate(layout.piece_bytes)
        except KVStoreError:
            return False
        if found is not None:
            self._arena.free(found)
        return found is not None

    # ------------------------------------------------------------ copies are read

    async def open(self, name: ChunkName, residency: Residency) -> DramChunk:
        placement = self._placements.get(residency)
        if placement is None:
            raise DataLoss("the arena holds no such chunk", reason="absent")
        header = check_header(name, parse_header(placement.pieces[0], name.layout))
        self._readers[residency] = self._readers.get(residency, 0) + 1
        return DramChunk(self, self._workers, residency, placement, header, name.layout)

    def was_read(self, byte_count: int) -> None:
        """Count bytes that were read and passed their checksums."""
        self._read_bytes += byte_count

    def closed(self, residency: Residency) -> None:
        """Count a reader out; free the copy if it was given up and this was its last reader."""
        self._readers[residency] -= 1
        if not self._readers[residency]:
            del self._readers[residency]
            if residency in self._leaving:
                self._arena.free(self._leaving.pop(residency))

    # ------------------------------------------------------------ copies go

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """See ``LocalTier.remove``. ``erase`` makes no difference: no start finds a copy in memory again."""
        for residency in residencies:
            placement = self._placements.pop(residency)
            if residency in self._readers:
                self._leaving[residency] = placement
            else:
                self._arena.free(placement)

    async def quarantine(self, residency: Residency) -> None:
        """Remove the copy. Memory has no bad places: the bytes were overwritten, and the next copy there is whole
        again."""
        self.remove([residency])

    async def renew(self, residency: Residency) -> bool:
        return True

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """Do nothing: no start finds a copy here."""

    async def tidy(self) -> None:
        """Do nothing: no copy waits to be erased."""

    # ------------------------------------------------------------ the tier is asked

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.full(len(residencies), Encoding.RAW, np.uint8)

    def stalled_s(self) -> float:
        return 0.0

    def statistics(self) -> TierStatistics:
        """Return the account. Extents that stores and loads have taken and not yet adopted count as allocated."""
        used = self._arena.used_bytes
        total = sum(region.byte_count for region in self._arena.regions)
        return TierStatistics(
            name=self.name, state="up", capacity_bytes=self._arena.capacity_bytes, file_bytes=total,
            allocated_bytes=used, free_bytes=total - used, quarantined_bytes=0, overhead_bytes=0,
            chunk_count=len(self._placements), read_bytes=self._read_bytes, written_bytes=self._written_bytes,
        )  # fmt: skip


class DramChunk:
    """An opened chunk in the arena. Its extents are not reused until it is closed."""

    def __init__(
        self, tier: DramTier, workers: Workers, residency: Residency, placement: Placement, header: ChunkHeader,
        layout: ChunkLayout,
    ) -> None:  # fmt: skip
        self.header = header
        self._tier = tier
        self._workers = workers
        self._residency = residency
        self._placement = placement
        self._layout = layout
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """See ``StoredChunk.read``."""
        header, layout = self.header, self._layout
        copies: list[Copy] = []
        for slab, into in zip(slabs, host_memory(target), strict=True):
            strips = strip_run(layout, header.storage_key, header.write_id, *layout.strips_of(range(slab, slab + 1)))
            copies.append((strips, self._placement.pieces[1 + slab], into))
        good = await done(self._workers, copy_slabs, copies, self._expected(slabs))
        self._was_read(slabs, good)

    async def check(self, slabs: range) -> None:
        """See ``StoredChunk.check``."""
        header, pieces = self.header, self._placement.pieces[1 + slabs.start : 1 + slabs.stop]
        runs = slab_runs(self._layout, header.storage_key, header.write_id, slabs, pieces)
        self._was_read(slabs, await done(self._workers, are_right, runs, self._expected(slabs)))

    def _expected(self, slabs: range) -> bytes:
        """Return the checksums that the strips must have."""
        return self.header.checksums_of(*self._layout.strips_of(slabs))

    def _was_read(self, slabs: range, good: bool) -> None:
        if not good:
            raise wrong_slabs(slabs, "in the arena")
        self._tier.was_read(sum(self._layout.slabs[slab].byte_count for slab in slabs))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tier.closed(self._residency)


Copy = tuple[StripRun, Bytes, Bytes]
"""A slab's strips, its source and its target."""


def copy_pieces(source: Sequence[Bytes], target: Sequence[Bytes]) -> None:
    """Copy each piece of the source into the target. Blocking."""
    for one, other in zip(source, target, strict=True):
        np.copyto(other, one)


def copy_slabs(copies: Sequence[Copy], expected: bytes) -> bool:
    """Copy slabs, and check the copies. Returns True when all strips are right. Blocking."""
    return b"".join([strips.copy(source, target) for strips, source, target in copies]) == expected
