"""The NVMe tier: chunks into slots and back.

Writing: the chunk's pieces go into a slot straight from memory, or sealed by the byte mover that writes them; one sync
serves all writes that wait for one (``sync``). Only then is the chunk acknowledged.

Reading: first the header, which must be the chunk that was asked for; then runs of slabs, straight into their place
where they are raw, each verified (and decoded) before a caller sees it (``reading``).
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.chunk import ChunkHeader, ChunkLayout, encode_chunk
from kvstore.errors import DataLoss, Exhausted, KVStoreError, Unavailable
from kvstore.seams import Clock, Disk, EnvelopeKey, EnvelopeRing, FaultPoints, Workers
from kvstore.seams.jobs import NotBegun, begun, to_its_end
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
    host_memory,
)
from kvstore.tiers.nvme import recovery
from kvstore.tiers.nvme.directory import ENVELOPES_USED, Directory, Snapshot
from kvstore.tiers.nvme.erasures import Erasures
from kvstore.tiers.nvme.free_slots import FreeSlots
from kvstore.tiers.nvme.io import DeviceIO, aligned, erase_at, rewrite
from kvstore.tiers.nvme.newest import Newest
from kvstore.tiers.nvme.outgoing import Outgoing, stored_header_bytes
from kvstore.tiers.nvme.plain import PlainCopies
from kvstore.tiers.nvme.reading import NvmeChunk, read_header
from kvstore.tiers.nvme.recovery import SCANNED
from kvstore.tiers.nvme.regions import ENCODING_MASK, Regions
from kvstore.tiers.nvme.slots import SEALED, RegionFile, region_of, slot_bytes_for
from kvstore.tiers.nvme.sync import GroupSync
from kvstore.tiers.pace import Pace
from kvstore.units import PAGE_BYTES

Result = TypeVar("Result")
STEP_S = 0.005


class NvmeTier:
    """Chunks in region files. Its workers are its own: a stalled device stalls no other tier. ``readers`` and
    ``writers`` move bytes, in any process; ``keepers`` are threads of this process, for headers, files and syncs.

    Raises: as in the contract; the device's errors become Unavailable, a lack of room Exhausted.
    """

    name = "nvme"
    kind = Tier.NVME
    durability = Durability.LOCAL

    def __init__(
        self,
        directory: Directory,
        regions: Regions,
        *,
        disk: Disk,
        io: DeviceIO,
        readers: Workers,
        writers: Workers,
        keepers: Workers,
        clock: Clock,
        faults: FaultPoints,
        encoding: Encoding,
        plain: PlainCopies | None = None,
    ) -> None:
        """``plain`` holds the envelope keys, and the list of believed copies without an envelope."""
        self.regions = regions
        self._plain = plain or PlainCopies()
        self._trust = self._plain.trust
        self._keys: dict[bytes, EnvelopeKey] = {}
        """Keys by id that copies here may be sealed with, also keys that left the ring: LOCAL was promised."""
        self._directory = directory
        self._io = io
        self._readers = readers
        self._writers = writers
        self._keepers = keepers
        self._clock = clock
        self._faults = faults
        self._encoding = encoding
        self._sync = GroupSync(disk, faults, lambda function: self._run(keepers, function))
        self._pace = {workers: Pace() for workers in (readers, writers, keepers)}
        self._read_bytes = self._written_bytes = 0
        self._in_flight: Counter[bytes] = Counter()
        """Storage keys of chunks that are being written."""
        keep = partial(self._run, keepers)
        self.erasures = Erasures(regions, Newest(directory), self._erase, keep)
        self.free_slots = FreeSlots(regions, self.erasures, keep, faults)

    async def recover(self, evictor: Evictor) -> Recovered:
        self.free_slots.evictor = evictor
        try:
            columns, is_clean = await self._read_back()
        except BaseException:
            await self.close(None)
            raise
        is_proven = (columns.residencies & SCANNED == 0) & is_clean
        return Recovered(replace(columns, residencies=columns.residencies & ~SCANNED), is_proven)

    async def _read_back(self) -> tuple[IndexColumns, bool]:
        """Return the device's copies: from the snapshot of a clean stop (True), or from every slot's header (False)."""
        try:
            self.regions.open_all()
            self._faults.reach("nvme.recovery.begin")
            self.erasures.newest.load()
            directory_id = self._plain.load(self._directory.directory_id)
            self.regions.avoid((file for file, _ in self.erasures.newest.closed), self._plain.regions)
            self._keys.update(self._trust.ring.keys)
            snapshot = self._directory.begin(self._trust.ring)
            self._directory.identify(directory_id)
            parts = (self.regions, self.erasures.newest, self._plain, self._io, self._keepers)
            clean = snapshot is not None and recovery.agree(self.regions, snapshot.columns)
            if snapshot is not None and clean:
                believed = self._plain.believes(snapshot.columns.residencies, snapshot.columns.marks)
                snapshot = replace(snapshot, columns=snapshot.columns.where(believed))
                columns, stale = await recovery.completed(snapshot, *parts)
            else:
                columns, stale = await recovery.scan(*parts)
            if self._plain.is_demanding or recovery.has_sealed(self.regions, columns):
                self._directory.require(ENVELOPES_USED)  # also where what said so is damaged
            columns = recovery.fitted(self.regions, columns)
            self._plain.keep(columns, self.regions)
        except OSError as error:
            raise Unavailable(f"{self._directory.path} cannot be used: {error}: set tiers.nvme.directory") from error
        self._faults.reach("nvme.recovery.read")
        self.erasures.doomed += (each for each in stale if region_of(each) in self.regions.by_number)
        self.regions.claim(np.concatenate([columns.residencies, np.array(self.erasures.doomed, np.int64)]))
        await self.erasures.begin()
        return columns, clean

    async def close(self, held: Recovered | None) -> None:
        """See ``LocalTier.close``. A clean stop erases what is to be erased, and leaves the snapshot. Otherwise (None)
        the next start reads the headers."""
        if held is not None:
            await self.erasures.erase_doomed()
        for workers in self._pace:
            workers.close()
        try:
            if held is not None:
                self._directory.end(self._snapshot(recovery.with_doubts(held)), self._trust.sealing())
        except OSError:
            pass  # without a snapshot the next start reads the headers
        self.regions.close()
        self._directory.close()

    def _snapshot(self, columns: IndexColumns) -> Snapshot:
        """Return the snapshot: the known copies, and the parts of the device of which nothing is known."""
        regions = self.regions.by_number
        key_ids = frozenset(self._keys) if recovery.has_sealed(self.regions, columns) else frozenset()
        unread = [(number, slot) for number, each in regions.items() for slot in each.unread | each.unerased]
        if not (unread or self.regions.away):
            return Snapshot(columns, key_ids=key_ids)
        return Snapshot(columns, frozenset(regions), tuple(unread), key_ids)

    # ------------------------------------------------------------ movers

    async def _run(self, workers: Workers, function: Callable[..., Result], *args: object) -> Result:
        """Run a device job on a byte mover, and translate its OSError. A cancelled caller is released only when the job
        is done: until then the device uses memory and slot."""
        job = asyncio.wrap_future(begun(workers, function, *args))
        self._pace[workers].began(job, self._clock)
        try:
            return await to_its_end(job)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise Exhausted("the device of tiers.nvme.directory is full: free some room there") from error
            raise Unavailable(f"the NVMe device failed: {error}", errno=error.errno) from error

    def stalled_s(self) -> float:
        """See ``LocalTier.stalled_s``; reads, writes and syncs count."""
        return max(pace.stalled_s(self._clock) for pace in self._pace.values())

    # ------------------------------------------------------------ write

    def has_room(self, layout: ChunkLayout) -> bool:
        stored = layout.body_bytes + stored_header_bytes(layout, self._trust.sealing())
        slot_bytes = slot_bytes_for(stored, is_full_raw=layout.is_full)
        return bool(self.regions.free_count(slot_bytes)) or self.regions.has_budget(slot_bytes)

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> Residency:
        self._in_flight[header.storage_key] += 1
        try:
            chunk = await self._outgoing(header, layout, host_memory(pieces))
            is_full_raw = self._encoding is Encoding.RAW and layout.is_full
            slot_bytes = slot_bytes_for(chunk.byte_count, is_full_raw=is_full_raw)
            residency = await self.free_slots.take(slot_bytes, self._encoding, sealed=chunk.sealing is not None)
            await self._fill(residency, chunk)
        finally:
            self._in_flight[header.storage_key] -= 1
            self._in_flight += Counter()  # drops the keys whose count is 0
        self._written_bytes += chunk.byte_count
        return residency

    async def _outgoing(self, header: ChunkHeader, layout: ChunkLayout, source: list[Bytes]) -> Outgoing:
        if self._encoding is not Encoding.RAW:
            room = aligned(layout.total_bytes)
            encoded = await self._run(self._keepers, encode_chunk, header, layout, source, room)
            header, source = encoded.header, [encoded.data]
        sealing = self._trust.sealing()
        if sealing is not None:
            self._keys[sealing.key.key_id] = sealing.key
        return Outgoing(header, layout, source, sealing)

    async def _fill(self, residency: Residency, chunk: Outgoing) -> None:
        """Write a slot, and sync it."""
        region, slot = self.regions.find(residency)
        self._faults.reach("nvme.allocated")
        failures = region.sync_failures
        try:
            write, args = chunk.job(region.seat(slot))
            await self._run(self._writers, write, self._io, region.descriptor, region.offset(slot), *args)
            self._faults.reach("nvme.written")
            await self._sync.wait(region, failures)
        except DataLoss:  # memory's, which is not sealed: no header was written
            self.regions.give_back(region, slot)
            raise
        except BaseException as error:
            self._failed(region, slot, error, may_be_replaced=chunk.may_be_replaced)
            raise

    def _failed(self, region: RegionFile, slot: int, error: BaseException, *, may_be_replaced: bool) -> None:
        """Take the slot of a failed write out of use: its content is unknown. A device error closes the region for
        writing (NotBegun is none). A replaceable copy is erased before its key is claimed again."""
        if isinstance(error, KVStoreError) and not isinstance(error, NotBegun):
            region.is_read_only = True
        if may_be_replaced:
            region.unerased.add(slot)
        else:
            self.regions.quarantine(region, slot)

    # ------------------------------------------------------------ read

    async def open(self, name: ChunkName, residency: Residency) -> NvmeChunk:
        region, slot = self.regions.find(residency)
        self.regions.begin_reading(region, slot)
        ring = EnvelopeRing(list(self._keys.values())) if residency & SEALED else None
        try:
            header = await self._run(self._keepers, read_header, self._io, region, slot, name, ring)
        except BaseException:
            self.regions.end_reading(region, slot)
            raise
        return NvmeChunk(self, self._io, region, slot, header, name.layout)

    async def run_read(self, function: Callable[..., Any], *args: object) -> Any:
        return await self._run(self._readers, function, *args)

    def was_read(self, byte_count: int) -> None:
        """Count bytes that were read and passed their checksums."""
        self._read_bytes += byte_count

    def closed(self, region: RegionFile, slot: int) -> None:
        """Count a reader out."""
        self.regions.end_reading(region, slot)

    # ------------------------------------------------------------ remove and tell

    def remove(self, residencies: Sequence[Residency], *, erase: bool = False) -> None:
        """See ``LocalTier.remove``. Writes nothing to the device: a scan may bring back a chunk that is not erased."""
        if erase:
            self.erasures.doomed += residencies
            return
        for residency in residencies:
            with suppress(Unavailable):  # its file is gone, and the slot with it
                self.regions.give_back(*self.regions.find(residency))

    async def tidy(self) -> None:
        if not self.erasures.is_tidy:
            await self.erasures.tidy()

    async def quarantine(self, residency: Residency) -> None:
        """Take the slot out of use, also where the device refuses to erase its header: ``tidy`` tries that again."""
        region, slot = self.regions.find(residency)
        region.unerased.add(slot)
        async with self.erasures.alone_at(region, slot):
            await self._erase(region, slot)
            self.regions.rest(region, slot)

    async def renew(self, residency: Residency) -> bool:
        """Write a copy again in place, and sync it: an earlier process left it, and whether its sync succeeded is
        unknown. A crash meanwhile finds the same bytes, old or new. False where nothing can be written."""
        region, slot = self.regions.find(residency)
        if region.is_read_only:
            return False
        failures = region.sync_failures
        place = (region.offset(slot), region.slot_bytes)
        async with self.erasures.alone_at(region, slot):  # else its old header would come back after an erasure
            await self._run(self._writers, rewrite, self._io, region.descriptor, *place)
        await self._sync.wait(region, failures)
        return True

    async def supersede(self, writes: Mapping[bytes, int], wait_s: float) -> None:
        """See ``LocalTier.supersede``: erase older writes, or record that they are not to be believed."""
        until_s = self._clock.monotonic() + wait_s
        while any(self._in_flight[key] for key in writes):
            if self._clock.monotonic() >= until_s:
                raise Unavailable("an older value is still being written to the device: try again")
            await self._clock.sleep(STEP_S)
        await self.erasures.erase_doomed()
        await self.erasures.note(writes)

    async def _erase(self, region: RegionFile, *slots: int) -> None:
        failures = region.sync_failures
        await self._run(self._keepers, erase_at, self._io, region.descriptor, [*map(region.offset, slots)])
        self._faults.reach("nvme.erased")
        await self._sync.wait(region, failures)

    def encodings(self, residencies: NDArray[np.int64]) -> NDArray[np.uint8]:
        return (residencies >> 56 & ENCODING_MASK).astype(np.uint8)

    def statistics(self) -> TierStatistics:
        regions = list(self.regions.by_number.values())
        used = sum(region.used_count * region.slot_bytes for region in regions)
        resting = sum(region.resting_count * region.slot_bytes for region in regions)
        free = sum(len(region.free) * region.slot_bytes for region in regions)
        read_only = bool(regions) and all(region.is_read_only for region in regions)
        return TierStatistics(
            name=self.name, state="read-only" if read_only else "up", capacity_bytes=self.regions.capacity_bytes,
            file_bytes=self.regions.file_bytes, allocated_bytes=used, free_bytes=free, quarantined_bytes=resting,
            overhead_bytes=len(regions) * PAGE_BYTES, chunk_count=sum(region.used_count for region in regions),
            read_bytes=self._read_bytes, written_bytes=self._written_bytes,
            envelope=self._trust.kind if self._plain.is_demanding else "", reason=self.regions.shortage,
        )  # fmt: skip
