"""Reads the headers of slots: after a crash, or when the snapshot is not to be believed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvstore.chunk import ChunkHeader, Trust, is_sealed, shown_header, write_mark
from kvstore.errors import DataLoss
from kvstore.seams import Workers
from kvstore.seams.jobs import begun, given_up, to_its_end
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Encoding
from kvstore.tiers.contract import RESIDENCY_STOP, IndexColumns, Recovered, Residency, SpaceName
from kvstore.tiers.nvme.directory import Snapshot
from kvstore.tiers.nvme.io import IO_BYTES, DeviceIO, aligned, is_erased
from kvstore.tiers.nvme.newest import Newest
from kvstore.tiers.nvme.plain import PlainCopies
from kvstore.tiers.nvme.reading import is_seated
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.slots import FLAGS_SHIFT, PLACE_MASK, SEALED, RegionFile, region_of, slot_of
from kvstore.units import PAGE_BYTES

SMALL_SLOT_BYTES = 64 << 10
"""Slots up to this size are read whole, many at a time: that is cheaper than a request for each header."""
SLOTS_PER_JOB = 256
SCANNED = RESIDENCY_STOP
"""Set, until a recovery ends, in a residency that a scan found while others come from a snapshot."""
_log = logging.getLogger("kvstore.nvme")


class ScannedSlot(NamedTuple):
    """One copy that a scan found."""

    residency: Residency
    header: ChunkHeader


class _Slots(NamedTuple):
    """The content of a run of slots: the chunks, the slots that the device could not read, those that are sealed with a
    key that is not here, with storage key and mark, and those that were erased."""

    found: list[ScannedSlot]
    refused: list[int]
    locked: dict[int, tuple[bytes, int]]
    erased: list[int]


class LockedSlot(Exception):
    """A slot holds a copy that only another key opens: a write (``mark``) of ``storage_key``."""

    def __init__(self, storage_key: bytes, mark: int) -> None:
        super().__init__(storage_key, mark)
        self.write = storage_key, mark


class ErasedSlot(Exception):
    """The copy in a slot was erased. Perhaps only in the page cache and not on the device: the sync of the erasure may
    have failed, or the process may have ended before it."""


def agree(regions: Regions, columns: IndexColumns) -> bool:
    """Return True when every row of a snapshot lies in an existing slot, no two in the same. Rows of a file that is not
    there now contradict nothing."""
    numbers = region_of(columns.residencies)
    slots = slot_of(columns.residencies)
    if len(np.unique(columns.residencies & PLACE_MASK)) != len(columns):
        return False
    for number in np.unique(numbers).tolist():
        region = regions.by_number.get(number)
        if region is not None and int(slots[numbers == number].max()) >= region.slot_count:
            return False
    return True


async def completed(
    snapshot: Snapshot, regions: Regions, newest: Newest, plain: PlainCopies, io: DeviceIO, readers: Workers
) -> tuple[IndexColumns, list[Residency]]:
    """Return the rows of a snapshot that agrees, as far as its files are there, followed by copies that a scan found
    where the snapshot knew nothing: in files that it does not name, and in slots that could not be read then. These are
    marked as ``SCANNED``. The second list has the copies that are not to be believed."""
    numbers = region_of(snapshot.columns.residencies)
    columns = snapshot.columns.where(np.isin(numbers, list(regions.by_number)))
    runs = [
        run
        for number, region in regions.by_number.items()
        if snapshot.regions is not None and number not in snapshot.regions
        for run in _runs(region)
    ]
    for number, slot in snapshot.unread:
        region = regions.by_number.get(number)
        if region is not None and 0 <= slot < region.slot_count:
            runs.append((region, slot, slot + 1))
    found, stale = (await _read_all(runs, newest, plain, io, readers)).columns(columns)
    return columns.followed_by(replace(found, residencies=found.residencies | SCANNED)), stale


def fitted(regions: Regions, columns: IndexColumns) -> IndexColumns:
    """Give up files until the rest fits the capacity, and return the columns that are left. The log says which files go
    before they go. Blocking. Raises OSError."""
    numbers = region_of(columns.residencies)
    found, counts = np.unique(numbers, return_counts=True)
    names = regions.surplus(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    if not names:
        return columns
    surplus = [region for region in regions.by_number.values() if region.path.name in names]
    unread = {name: size for name, size in regions.away.items() if name in names}
    stays = ~np.isin(numbers, [region.number for region in surplus])
    _log.warning(
        "tiers.nvme.capacity_bytes is smaller than it was: region files are given up now, and what they hold",
        extra={
            "capacity_bytes": regions.capacity_bytes, "files": names, "files_that_could_not_be_read": len(unread),
            "bytes": sum(region.file_bytes for region in surplus) + sum(unread.values()),
            "chunks": int((~stays).sum()),
        },
    )  # fmt: skip
    for region in surplus:
        regions.retire(region)
        regions.remove_file(region)
    for name in unread:
        regions.remove_away(name)
    return columns.where(stays)


def has_sealed(regions: Regions, columns: IndexColumns) -> bool:
    """Return True when there are copies in envelopes."""
    return bool((columns.residencies & SEALED).any()) or any(each.locked for each in regions.by_number.values())


def with_doubts(held: Recovered) -> IndexColumns:
    """Return columns in which copies that a crash left, and that were not proven since, are marked: doubt outlives a
    clean stop."""
    doubts = np.where(held.is_proven, np.int64(0), np.int64(SCANNED))
    return replace(held.columns, residencies=held.columns.residencies | doubts)


async def scan(
    regions: Regions, newest: Newest, plain: PlainCopies, io: DeviceIO, readers: Workers
) -> tuple[IndexColumns, list[Residency]]:
    """Read every slot's header. Return the copies found, and the places of older writes that are not to be believed.
    Cost: a small read per slot, or the whole region where slots are small."""
    runs = [run for region in regions.by_number.values() for run in _runs(region)]
    return (await _read_all(runs, newest, plain, io, readers)).columns()


SlotRun = tuple[RegionFile, int, int]
"""Slots ``first .. stop`` of a region: one job."""


def _runs(region: RegionFile) -> Iterator[SlotRun]:
    step = SLOTS_PER_JOB if region.slot_bytes > SMALL_SLOT_BYTES else max(1, IO_BYTES // region.slot_bytes)
    for first in range(0, region.slot_count, step):
        yield region, first, min(first + step, region.slot_count)


async def _read_all(
    runs: Sequence[SlotRun], newest: Newest, plain: PlainCopies, io: DeviceIO, readers: Workers
) -> Gathered:
    """Read these slots. A slot that the device cannot read, or whose key is not here, is ``unread`` from now on: it may
    hold a chunk. A slot that an earlier process erased is ``unerased``: this process has not synced the erasure, and a
    power cut may undo it."""
    trust = plain.trust
    jobs = [(region, begun(readers, _scan_slots, io, trust, region, first, stop)) for region, first, stop in runs]
    gathered = Gathered(newest, plain)
    unread = locked = 0
    try:
        for number, (region, job) in enumerate(jobs):
            slots = await to_its_end(asyncio.wrap_future(job))
            gathered.add(region.path.name, slots.found)
            region.unread.update(slots.refused, slots.locked)
            region.locked.update(slots.locked)
            region.unerased.update(slots.erased)
            unread += len(slots.refused)
            locked += len(slots.locked)
            if number % 256 == 255:
                _log.info("reading headers", extra={"jobs_done": number + 1, "jobs": len(jobs)})
    finally:
        await given_up([job for _, job in jobs])  # before their files are closed
    if unread:
        _log.error("headers could not be read: their slots are left alone", extra={"slots": unread})
    if locked:
        _log.error(
            "chunks on the device are sealed with keys that are not in the tenant's envelope key file, or with aead, "
            "for which the package cryptography is missing: they are misses, and stay; put the keys back, or install "
            "kvstore[aead], and start again to have them",
            extra={"chunks": locked},
        )
    return gathered


def _scan_slots(io: DeviceIO, trust: Trust, region: RegionFile, first: int, stop: int) -> _Slots:
    """Read a run of slots. Blocking."""
    slots = _Slots([], [], {}, [])
    if region.slot_bytes <= SMALL_SLOT_BYTES and stop - first > 1:
        run = aligned((stop - first) * region.slot_bytes)
        try:
            io.read(region.descriptor, region.offset(first), run)
        except (OSError, DataLoss):
            pass  # then each slot is read by itself
        else:
            for slot, at in enumerate(range(0, run.size, region.slot_bytes), first):
                _note(slots, slot, partial(_parse, trust, region, slot, run[at : at + region.slot_bytes]))
            return slots
    for slot in range(first, stop):
        _note(slots, slot, partial(read_slot, io, trust, region, slot))
    return slots


def _note(slots: _Slots, slot: int, look: Callable[[], ScannedSlot | None]) -> None:
    try:
        found = look()
    except OSError:
        slots.refused.append(slot)
    except LockedSlot as locked:
        slots.locked[slot] = locked.write
    except ErasedSlot:
        slots.erased.append(slot)
    else:
        slots.found.extend([found] if found is not None else [])


def read_slot(io: DeviceIO, trust: Trust, region: RegionFile, slot: int) -> ScannedSlot | None:
    """Return the copy that a slot's header describes, or None without a valid header. Blocking. Raises OSError;
    LockedSlot; ErasedSlot."""
    page = aligned(PAGE_BYTES)
    try:
        io.read(region.descriptor, region.offset(slot), page)
        size = int.from_bytes(page[12:16].tobytes(), "little")
        if PAGE_BYTES < size <= region.slot_bytes and size % PAGE_BYTES == 0 and page[:8].tobytes() == b"KVSCHUNK":
            page = aligned(size)
            io.read(region.descriptor, region.offset(slot), page)
    except DataLoss:
        return None
    return _parse(trust, region, slot, page)


def _parse(trust: Trust, region: RegionFile, slot: int, data: Bytes) -> ScannedSlot | None:
    if is_erased(data):
        raise ErasedSlot
    envelope = is_sealed(data)
    try:
        header = trust.read_header(data, None, may_be_plain=True)
        shown = shown_header(data) if header is None and envelope else None
    except DataLoss:
        return None
    if shown is not None:
        raise LockedSlot(shown.storage_key, write_mark(shown.write_id))
    if header is None or not is_seated(data, region, slot):
        return None
    encoding = Encoding.RAW if header.encoding == "raw" else Encoding.LZ4
    flags = encoding << FLAGS_SHIFT | (SEALED if envelope else 0)
    return ScannedSlot(flags | region.number << 32 | slot, header)


class Gathered:
    """The copies that scans found, in columns: headers are not kept. One write of a replaceable chunk is believed.
    Where ``newest`` names none, and there are several, it is unknown which is older, and none is believed. A copy
    without an envelope is left out where ``plain`` does not believe it."""

    def __init__(self, newest: Newest, plain: PlainCopies) -> None:
        self._newest = newest
        self._plain = plain
        self._spaces: dict[SpaceName, int] = {}
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._digests: list[bytes] = []
        self._parents: list[bytes] = []
        self._stale: list[Residency] = []
        self._replaceable: dict[bytes, list[int]] = {}
        """Storage key -> numbers of its rows."""

    def add(self, file: str, found: Sequence[ScannedSlot]) -> None:
        """Add the chunks of one region file."""
        marks = [write_mark(each.header.write_id) for each in found]
        residencies = np.array([each.residency for each in found], np.int64)
        believed = self._plain.believes(residencies, np.array(marks, np.uint64)).tolist()
        for (residency, header), mark, is_believed in zip(found, marks, believed, strict=True):
            if not is_believed:
                continue
            if header.kind is CacheKind.OPAQUE:
                if self._newest.is_stale(header.storage_key, mark, (file, slot_of(residency))):
                    self._stale.append(residency)
                    continue
                self._replaceable.setdefault(header.storage_key, []).append(len(self._rows))
            name = header.fingerprint, header.provenance, header.exactness
            space = self._spaces.setdefault(name, len(self._spaces))
            self._rows.append((residency, mark, header.token_count, space, header.stored_s))
            self._digests.append(header.chain_digest)
            self._parents.append(header.parent)

    def columns(self, known: IndexColumns | None = None) -> tuple[IndexColumns, list[Residency]]:
        """Return the copies to believe in addition to those ``known`` already, and the residencies of the others."""
        columns = list(zip(*self._rows, strict=True)) or [(), (), (), (), ()]
        whole = IndexColumns(
            list(self._spaces),
            np.array(columns[0], np.int64),
            np.array(columns[1], np.uint64),
            np.array(columns[2], np.int32),
            np.array(columns[3], np.uint16),
            b"".join(self._digests),
            b"".join(self._parents),
            np.array(columns[4], np.uint32),
        )
        doubtful = self._doubtful(known)
        stays = np.ones(len(whole), np.bool_)
        stays[doubtful] = False
        return whole.where(stays), self._stale + whole.residencies[doubtful].tolist()

    def _doubtful(self, known: IndexColumns | None) -> list[int]:
        doubtful = [
            row for rows in self._replaceable.values() if len({self._rows[row][1] for row in rows}) > 1 for row in rows
        ]
        if known is not None and self._replaceable:
            marks = dict(zip(known.each_digest(), known.marks.tolist(), strict=True))
            for row in (row for rows in self._replaceable.values() for row in rows):
                mark = self._rows[row][1]
                if marks.get(self._digests[row], mark) != mark:
                    doubtful.append(row)
        if doubtful:
            _log.error("of several writes under one key nobody knows the newest", extra={"chunks": len(doubtful)})
        return sorted(set(doubtful))
