"""The smallest tier there is: chunks in a dict. What other tests may use where any tier will do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkHeader, ChunkLayout, decode_slab, parse_header, strip_seeds
from kvstore.errors import DataLoss, Exhausted
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Encoding, Tier
from kvstore.tiers import ChunkName, Evictor, IndexColumns, Recovered, Residency, TierStatistics, check_header


class FakeTier:
    """Keeps copies of pieces. ``held`` is open to tests that damage it. Yields once in each call, as others do."""

    def __init__(self, capacity_bytes: int) -> None:
        self.held: dict[Residency, list[Bytes]] = {}
        self._capacity_bytes = capacity_bytes
        self._open_count: dict[Residency, int] = {}
        self._leaving: set[Residency] = set()
        self._last = -1
        self._read_bytes = self._written_bytes = 0

    @property
    def _held_bytes(self) -> int:
        return sum(piece.size for pieces in self.held.values() for piece in pieces)

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        await asyncio.sleep(0)
        if not self.has_room(layout):
            self._evictor.evict(lambda _: True, lambda: self.has_room(layout))
        if not self.has_room(layout):
            raise Exhausted("the fake is full")
        self._last += 1
        self.held[self._last] = [piece.copy() for piece in pieces]
        self._written_bytes += layout.total_bytes
        return self._last

    async def open(self, name: ChunkName, residency: Residency) -> FakeChunk:
        await asyncio.sleep(0)
        if residency not in self.held or residency in self._leaving:
            raise DataLoss("the fake holds no such chunk", reason="absent")
        header = check_header(name, parse_header(self.held[residency][0], name.layout))
        self._open_count[residency] = self._open_count.get(residency, 0) + 1
        return FakeChunk(self, residency, name.layout, header)

    name, kind, durability = "fake", Tier.DRAM, Durability.MEMORY

    async def recover(self, evictor: Evictor) -> Recovered:
        self._evictor = evictor
        return Recovered(IndexColumns(), np.empty(0, np.bool_))

    async def close(self, held: IndexColumns | None) -> None:
        """Nothing to leave."""

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        self._leaving.update(self.held.keys() & set(residencies))
        self._let_go()

    async def quarantine(self, residency: Residency) -> None:
        self.remove([residency])

    async def renew(self, residency: Residency) -> bool:
        return True

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """No start finds anything here."""

    async def tidy(self) -> None:
        """Nothing to do."""

    def has_room(self, layout: ChunkLayout) -> bool:
        return self._held_bytes + layout.total_bytes <= self._capacity_bytes

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return np.full(len(residencies), Encoding.RAW, np.uint8)

    def stalled_s(self) -> float:
        return 0.0

    def _let_go(self) -> None:
        for residency in self._leaving - self._open_count.keys():
            self._leaving.discard(residency)
            del self.held[residency]

    def closed(self, residency: Residency, byte_count: int) -> None:
        """A reader is done."""
        self._read_bytes += byte_count
        self._open_count[residency] -= 1
        if not self._open_count[residency]:
            del self._open_count[residency]
        self._let_go()

    def statistics(self) -> TierStatistics:
        held = self._held_bytes
        return TierStatistics(
            name="fake", state="up", capacity_bytes=self._capacity_bytes, file_bytes=held, allocated_bytes=held,
            free_bytes=0, quarantined_bytes=0, overhead_bytes=0, chunk_count=len(self.held),
            read_bytes=self._read_bytes, written_bytes=self._written_bytes, verified_bytes=self._read_bytes,
        )  # fmt: skip


class FakeChunk:
    """A chunk of the fake, opened."""

    def __init__(self, tier: FakeTier, residency: Residency, layout: ChunkLayout, header: ChunkHeader) -> None:
        self.header = header
        self._tier = tier
        self._residency = residency
        self._layout = layout
        self._seeds = strip_seeds(header.storage_key, layout, header.write_id)
        self._read_bytes = 0
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Bytes]) -> None:
        await asyncio.sleep(0)
        for slab, into in zip(slabs, target, strict=True):
            source = self._tier.held[self._residency][1 + slab]
            if not decode_slab(self.header, self._layout, slab, source, into, self._seeds):
                raise DataLoss(f"slab {slab} of the fake fails its check", reason="checksum", slab=slab)
            self._read_bytes += into.size

    async def check(self, slabs: range) -> None:
        await self.read(slabs, [np.empty(self._layout.slabs[slab].byte_count, np.uint8) for slab in slabs])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tier.closed(self._residency, self._read_bytes)
