"""What the slots hold, read from the headers: after a crash, or when the snapshot is not to be believed."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from kvstore.chunk import ChunkHeader, parse_header, write_mark
from kvstore.errors import DataLoss
from kvstore.keys import DIGEST_BYTES
from kvstore.seams import Workers
from kvstore.seams.memory import Bytes
from kvstore.spec import Encoding
from kvstore.tiers.contract import Found
from kvstore.tiers.nvme.directory import IndexColumns, SpaceName
from kvstore.tiers.nvme.io import IO_BYTES, PAGE_BYTES, DeviceIO, aligned
from kvstore.tiers.nvme.regions import Region, Regions

SMALL_SLOT_BYTES = 64 << 10
"""Slots below are read whole, many at a time: cheaper than a request for each header."""
SLOTS_PER_JOB = 256
_log = logging.getLogger("kvstore.nvme")


def agree(regions: Regions, columns: IndexColumns) -> bool:
    """Whether every row of a snapshot lies in a slot there is, no two in the same."""
    numbers = columns.residencies >> 32 & 0xFFFFFF
    slots = columns.residencies & 0xFFFFFFFF
    if len(np.unique(columns.residencies & 0xFFFFFFFFFFFFFF)) != len(columns):
        return False
    for number in np.unique(numbers).tolist():
        region = regions.by_number.get(number)
        if region is None or int(slots[numbers == number].max()) >= region.slot_count:
            return False
    return True


def fitted(regions: Regions, columns: IndexColumns) -> IndexColumns:
    """Blocking. What is left once the files fit the capacity. Raises OSError."""
    numbers = columns.residencies >> 32 & 0xFFFFFF
    found, counts = np.unique(numbers, return_counts=True)
    gone = regions.fit(dict(zip(found.tolist(), counts.tolist(), strict=True)))
    if not gone:
        return columns
    stays = ~np.isin(numbers, list(gone))
    _log.warning(
        "tiers.nvme.capacity_bytes is smaller than it was: region files were given up",
        extra={"files": len(gone), "chunks": int((~stays).sum())},
    )

    def kept(digests: bytes) -> bytes:
        return np.frombuffer(digests, f"V{DIGEST_BYTES}")[stays].tobytes()

    return IndexColumns(
        columns.names, columns.residencies[stays], columns.marks[stays], columns.token_counts[stays],
        columns.spaces[stays], kept(columns.digests), kept(columns.parents),
    )  # fmt: skip


async def scan(regions: Regions, io: DeviceIO, readers: Workers) -> IndexColumns:
    """Read every slot's header. Cost: a small read per slot, or the whole region where slots are small."""
    jobs = []
    for region in regions.by_number.values():
        step = SLOTS_PER_JOB if region.slot_bytes > SMALL_SLOT_BYTES else max(1, IO_BYTES // region.slot_bytes)
        for first in range(0, region.slot_count, step):
            jobs.append(readers.submit(_scan_slots, io, region, first, min(first + step, region.slot_count)))
    columns = _Columns()
    for number, job in enumerate(jobs):
        columns.add(await asyncio.wrap_future(job))
        if number % 256 == 255:
            _log.info("reading headers", extra={"jobs_done": number + 1, "jobs": len(jobs)})
    return columns.built()


def _scan_slots(io: DeviceIO, region: Region, first: int, stop: int) -> list[Found]:
    """Blocking. The chunks of a run of slots; a slot that cannot be read holds none."""
    if region.slot_bytes > SMALL_SLOT_BYTES:
        found = [read_slot(io, region, slot) for slot in range(first, stop)]
        return [each for each in found if each is not None]
    run = aligned((stop - first) * region.slot_bytes)
    try:
        io.read(region.descriptor, region.offset(first), run)
    except (OSError, DataLoss):
        found = [read_slot(io, region, slot) for slot in range(first, stop)]
        return [each for each in found if each is not None]
    views = (run[at : at + region.slot_bytes] for at in range(0, run.size, region.slot_bytes))
    return [each for slot, view in enumerate(views, first) if (each := _parse(region, slot, view)) is not None]


def read_slot(io: DeviceIO, region: Region, slot: int) -> Found | None:
    """Blocking. What a slot's header says it holds, if it is one."""
    page = aligned(PAGE_BYTES)
    try:
        io.read(region.descriptor, region.offset(slot), page)
        size = int.from_bytes(page[12:16].tobytes(), "little")
        if PAGE_BYTES < size <= region.slot_bytes and size % PAGE_BYTES == 0 and page[:8].tobytes() == b"KVSCHUNK":
            page = aligned(size)
            io.read(region.descriptor, region.offset(slot), page)
    except (OSError, DataLoss):
        return None
    return _parse(region, slot, page)


def _parse(region: Region, slot: int, data: Bytes) -> Found | None:
    try:
        header = parse_header(data)
    except DataLoss:
        return None
    encoding = Encoding.RAW if header.encoding == "raw" else Encoding.LZ4
    return Found(encoding << 56 | region.number << 32 | slot, header)


class _Columns:
    """Gathers what scans found."""

    def __init__(self) -> None:
        self._spaces: dict[SpaceName, int] = {}
        self._rows: list[tuple[int, int, int, int]] = []
        self._digests: list[bytes] = []
        self._parents: list[bytes] = []

    def add(self, found: list[Found]) -> None:
        for residency, header in ((each.residency, each.header) for each in found):
            space = self._spaces.setdefault(_space(header), len(self._spaces))
            self._rows.append((residency, write_mark(header.write_id), header.token_count, space))
            self._digests.append(header.chain_digest)
            self._parents.append(header.parent)

    def built(self) -> IndexColumns:
        columns = list(zip(*self._rows, strict=True)) or [(), (), (), ()]
        return IndexColumns(
            list(self._spaces),
            np.array(columns[0], np.int64),
            np.array(columns[1], np.uint64),
            np.array(columns[2], np.int32),
            np.array(columns[3], np.uint16),
            b"".join(self._digests),
            b"".join(self._parents),
        )


def _space(header: ChunkHeader) -> SpaceName:
    return header.fingerprint, header.provenance, header.exactness
