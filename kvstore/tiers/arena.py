"""The arena as a tier: memory, volatile. The controller's hot path uses the arena itself; this is the same memory
under the contract, for what treats all tiers alike (the canary, the conformance suite)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np

from kvstore.arena import Arena, Placement
from kvstore.chunk import ChunkHeader, ChunkLayout, decode_slab, parse_header, strip_seeds
from kvstore.errors import DataLoss, Exhausted, InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.tiers.contract import ChunkName, Found, Residency, TierStatistics, check_header


class ArenaTier:
    """Copies into and out of extents of the arena it is given. A residency is a generation slot."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._placements: dict[Residency, Placement] = {}
        self._readers: dict[Residency, int] = {}
        self._removed: set[Residency] = set()
        self._read_bytes = self._written_bytes = 0

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        try:
            placement = self._arena.allocate(layout.piece_bytes)
        except InvalidRequest as error:
            raise Exhausted(error.message) from error
        if placement is None:
            raise Exhausted("the arena is full: raise arena.capacity_bytes")
        for target, source in zip(placement.pieces, pieces, strict=True):
            np.copyto(target, source)
        self._placements[placement.slot] = placement
        self._written_bytes += placement.byte_count
        return placement.slot

    async def open(self, name: ChunkName, residency: Residency) -> ArenaChunk:
        placement = self._placements.get(residency)
        if placement is None:
            raise DataLoss("the arena holds no such chunk", reason="absent")
        header = check_header(name, parse_header(placement.pieces[0], name.layout))
        self._readers[residency] = self._readers.get(residency, 0) + 1
        return ArenaChunk(self, residency, placement, header, name.layout)

    async def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        for residency in residencies:
            if residency in self._placements:
                self._removed.add(residency)
                self._free(residency)

    def _free(self, residency: Residency) -> None:
        if residency in self._removed and not self._readers.get(residency):
            self._removed.discard(residency)
            self._arena.free(self._placements.pop(residency))

    def closed(self, residency: Residency, byte_count: int) -> None:
        """A reader is done."""
        self._read_bytes += byte_count
        self._readers[residency] -= 1
        if not self._readers[residency]:
            del self._readers[residency]
        self._free(residency)

    async def scan(self) -> AsyncIterator[Found]:
        for residency, placement in list(self._placements.items()):
            try:
                header = parse_header(placement.pieces[0])
            except DataLoss:
                continue
            if residency not in self._removed:
                yield Found(residency, header)

    def statistics(self) -> TierStatistics:
        held = sum(placement.byte_count for placement in self._placements.values())
        total = sum(region.byte_count for region in self._arena.regions)
        return TierStatistics(
            name="dram", state="up", capacity_bytes=self._arena.capacity_bytes, file_bytes=total,
            allocated_bytes=held, free_bytes=total - held, quarantined_bytes=0, overhead_bytes=0,
            chunk_count=len(self._placements), read_bytes=self._read_bytes, written_bytes=self._written_bytes,
            verified_bytes=self._read_bytes,
        )  # fmt: skip


class ArenaChunk:
    """A chunk in the arena, opened."""

    def __init__(
        self, tier: ArenaTier, residency: Residency, placement: Placement, header: ChunkHeader, layout: ChunkLayout
    ) -> None:
        self.header = header
        self._tier = tier
        self._residency = residency
        self._placement = placement
        self._layout = layout
        self._seeds = strip_seeds(header.storage_key, layout, header.write_id)
        self._read_bytes = 0
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Bytes]) -> None:
        for index, into in zip(slabs, target, strict=True):
            piece = self._placement.pieces[1 + index]
            if not decode_slab(self.header, self._layout, index, piece, into, self._seeds):
                raise DataLoss(f"slab {index} in the arena fails its check", reason="checksum", slab=index)
            self._read_bytes += int(into.size)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tier.closed(self._residency, self._read_bytes)
