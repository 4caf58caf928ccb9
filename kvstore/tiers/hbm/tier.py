"""The HBM tier: whole chunks in a pool of device memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    StripMemory,
    pack_header,
    parse_header,
    settle_runs,
    slab_runs,
    wrong_slabs,
)
from kvstore.errors import DataLoss, Exhausted, KVStoreError
from kvstore.seams import Clock, SystemClock, Workers
from kvstore.seams.devices import DeviceRegion
from kvstore.seams.jobs import NotBegun, begun, done, failure_of, to_its_end
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
from kvstore.tiers.hbm.pool import Pool, PoolExtent
from kvstore.tiers.pace import Pace

APART_COUNT = 16
"""Copies that go one by one, the least recently used first, before the neighbours of one of them go with it."""
TRIED_COUNT = 4
"""Places that are tried then: readers may hold something in each."""


class _Copy(NamedTuple):
    """One copy. The packed header is the tier's own: what lies on the device may have been written by others."""

    extent: PoolExtent
    packed: bytes


class HbmTier:
    """Copies into and out of a pool. A residency is a generation slot. ``workers``: threads of the process that owns
    the pool, for no fork of it can reach a CUDA device."""

    name = "hbm"
    kind = Tier.HBM
    durability = Durability.MEMORY

    def __init__(self, pool: Pool, workers: Workers, clock: Clock | None = None) -> None:
        self.pool = pool
        self._workers = workers
        self._clock = clock or SystemClock()
        self._pace = Pace()
        self._evictor: Evictor | None = None
        self._copies: dict[Residency, _Copy] = {}
        self._readers: dict[Residency, int] = {}
        self._leaving: dict[Residency, PoolExtent] = {}
        """Copies that were given up while a reader had them open."""
        self._problem = ""
        self._read_bytes = self._written_bytes = 0

    async def recover(self, evictor: Evictor) -> Recovered:
        """Return no copies: the device keeps nothing over a start."""
        self._evictor = evictor
        return Recovered(IndexColumns(), np.empty(0, np.bool_))

    async def close(self, held: Recovered | None) -> None:
        """Let go of the device's memory. It waits for a device that hangs, and holds up nothing else meanwhile."""
        await done(self._workers, self.pool.region.close)  # after the jobs that were taken before
        self._workers.close()
        self.pool.close()

    # ------------------------------------------------------------ copies come

    def extent(self, residency: Residency) -> PoolExtent:
        """Return the place of a copy, which clients read without a call. The caller knows that it is there."""
        return self._copies[residency].extent

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        """See ``LocalTier.write``. A cancelled caller does not wait for a device that hangs: the job keeps the memory
        that it reads, and the room is free once it has ended."""
        source = host_memory(pieces)
        extent = self._allocate(layout.total_bytes)
        job = self._begun(self.pool.region.write, extent.offset, source)
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError:
            job.add_done_callback(lambda _: self.pool.free(extent))
            raise
        try:
            await self._ended(job)
        except BaseException:
            self.pool.free(extent)
            raise
        self._written_bytes += extent.byte_count
        self._copies[extent.slot] = _Copy(extent, pack_header(header, layout))
        return extent.slot

    def _allocate(self, byte_count: int) -> PoolExtent:
        """Return room for a chunk; other copies go for it. Raises Exhausted."""
        found = self.pool.allocate(byte_count)
        if found is None and self._evictor is not None and byte_count <= self.pool.capacity_bytes:
            found = self._room(byte_count, self._evictor)
        if found is None:
            raise Exhausted("the pool on the device is full: raise tiers.hbm.capacity_bytes")
        return found

    def _room(self, byte_count: int, evictor: Evictor) -> PoolExtent | None:
        """Make room. Where the copies that are next to go lie apart and are smaller than what comes, waiting for two of
        them to be neighbours would empty half the pool: then the neighbours of one of them go with it."""
        found: PoolExtent | None = None
        next_to_go: list[int] = []
        count = 0

        def seen(residency: Residency) -> bool:
            next_to_go.append(self._copies[residency].extent.offset)
            return True

        def enough() -> bool:
            nonlocal found, count
            found, count = self.pool.allocate(byte_count), count + 1
            return found is not None or count == APART_COUNT

        evictor.evict(seen, enough)
        if found is None:
            for offset in next_to_go[:TRIED_COUNT]:
                if evictor.evict_all(self._within(min(offset, self.pool.capacity_bytes - byte_count), byte_count)):
                    found = self.pool.allocate(byte_count)
                if found is not None:
                    break
        return found

    def _within(self, begin: int, byte_count: int) -> list[Residency]:
        """Return the copies that lie, wholly or in part, in a run of the pool. Looks at every copy."""
        stop = begin + byte_count
        return [
            residency
            for residency, (extent, _) in self._copies.items()
            if extent.offset < stop and extent.offset + extent.byte_count > begin
        ]

    def _begun(self, function: Callable[..., None], *arguments: object) -> asyncio.Future[None]:
        """Begin to move bytes."""
        job = asyncio.wrap_future(begun(self._workers, function, *arguments))
        self._pace.began(job, self._clock)
        job.add_done_callback(failure_of)  # a cancelled caller does not ask for it
        return job

    async def _ended(self, job: asyncio.Future[None]) -> None:
        """Wait for a job. Remembers what the device says: nothing else tells that it has failed."""
        try:
            await to_its_end(job)
        except NotBegun:
            raise
        except KVStoreError as error:
            self._problem = error.message
            raise
        self._problem = ""

    def has_room(self, layout: ChunkLayout) -> bool:
        """See ``LocalTier.has_room``. Only a trial tells whether the free bytes are in one piece."""
        found = self.pool.allocate(layout.total_bytes)
        if found is not None:
            self.pool.free(found)
        return found is not None

    # ------------------------------------------------------------ copies are read

    async def open(self, name: ChunkName, residency: Residency) -> HbmChunk:
        found = self._copies.get(residency)
        if found is None:
            raise DataLoss("the pool holds no such chunk", reason="absent")
        header = check_header(name, parse_header(np.frombuffer(found.packed, np.uint8), name.layout))
        packed = np.empty(len(found.packed), np.uint8)
        self._readers[residency] = self._readers.get(residency, 0) + 1
        chunk = HbmChunk(self, residency, found.extent, header, name.layout)
        try:
            await self.read_into([(found.extent.offset, packed)])
            if packed.tobytes() != found.packed:
                raise DataLoss("the header on the device is not the one that was written", reason="header")
        except BaseException:
            chunk.close()
            raise
        return chunk

    async def read_into(self, reads: Sequence[tuple[int, Bytes]]) -> None:
        """Copy bytes of the region to host memory: (offset, target) of each."""
        await self._ended(self._begun(_read, self.pool.region, reads))

    async def are_right(self, runs: Sequence[StripMemory], expected: bytes) -> bool:
        """Return True when strips in host memory have these checksums; they count as read then. Bytes that no strip
        covers become zero."""
        good = await done(self._workers, settle_runs, runs, expected)
        if good:
            self._read_bytes += sum(data.size for data, _ in runs)
        return good

    def closed(self, residency: Residency) -> None:
        """Count a reader out; free the copy if it was given up and this was its last reader."""
        self._readers[residency] -= 1
        if not self._readers[residency]:
            del self._readers[residency]
            if residency in self._leaving:
                self.pool.free(self._leaving.pop(residency))

    # ------------------------------------------------------------ copies go

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """See ``LocalTier.remove``. ``erase`` makes no difference: no start finds a copy on the device again."""
        for residency in residencies:
            extent = self._copies.pop(residency).extent
            if residency in self._readers:
                self._leaving[residency] = extent
            else:
                self.pool.free(extent)

    async def quarantine(self, residency: Residency) -> None:
        """Remove the copy. Memory has no bad places: a client may have written there."""
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
        return self._pace.stalled_s(self._clock)

    def statistics(self) -> TierStatistics:
        capacity, free = self.pool.capacity_bytes, self.pool.free_bytes
        return TierStatistics(
            name=self.name, state="failing" if self._problem else "up", capacity_bytes=capacity, file_bytes=capacity,
            allocated_bytes=capacity - free, free_bytes=free, quarantined_bytes=0, overhead_bytes=0,
            chunk_count=len(self._copies), read_bytes=self._read_bytes, written_bytes=self._written_bytes,
            reason=self._problem,
        )  # fmt: skip


class HbmChunk:
    """An opened copy. Its extent is not reused until it is closed."""

    def __init__(
        self, tier: HbmTier, residency: Residency, extent: PoolExtent, header: ChunkHeader, layout: ChunkLayout
    ) -> None:
        self.header = header
        self._tier = tier
        self._residency = residency
        self._extent = extent
        self._layout = layout
        self._is_closed = False

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """See ``StoredChunk.read``. The bytes are checked where they were copied to: those on the device may change."""
        into, layout = host_memory(target), self._layout
        begin = self._extent.offset + layout.header_bytes
        await self._tier.read_into(
            [(begin + layout.slabs[slab].offset, each) for slab, each in zip(slabs, into, strict=True)]
        )
        runs = slab_runs(layout, self.header.storage_key, self.header.write_id, slabs, into)
        if not await self._tier.are_right(runs, self.header.checksums_of(*layout.strips_of(slabs))):
            raise wrong_slabs(slabs, "on the device")

    async def check(self, slabs: range) -> None:
        """See ``StoredChunk.check``."""
        await self.read(slabs, [np.empty(self._layout.slabs[slab].byte_count, np.uint8) for slab in slabs])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tier.closed(self._residency)


def _read(region: DeviceRegion, reads: Sequence[tuple[int, Bytes]]) -> None:
    """Copy bytes of the device to host memory. Blocking."""
    for offset, target in reads:
        region.read(offset, target)
