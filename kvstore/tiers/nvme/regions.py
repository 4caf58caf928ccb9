"""Region files and their slots: finds room, and keeps the account of all of it.

A residency is one number: sealed << 61 | encoding << 56 | region << 32 | slot. Slots are handed out and given back on
the event loop's thread; files are made and removed on a byte mover, one at a time.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Exhausted, Unavailable
from kvstore.seams import Disk, FaultPoints, Lender, OwnThreads
from kvstore.spec import Encoding
from kvstore.tiers.contract import HelpingCopies, Residency
from kvstore.tiers.nvme.files import Files
from kvstore.tiers.nvme.io import DeviceIO
from kvstore.tiers.nvme.slots import FLAGS_SHIFT, SEALED, RegionFile, region_of, remedy_of, slot_of
from kvstore.units import PAGE_BYTES

_NAME = re.compile(r"region-(\d{5,7})-([1-9]\d{3,12})\.kvs")
REGION_COUNT_MAX = 1 << 24
FIRST_REGION_BYTES = 4 << 20
FIRST_SLOT_COUNT = 4
QUARANTINE_SHARE = 64
"""At most one slot in so many of a region stays in quarantine (and one at least); the oldest is used again."""
FLAGS_MASK, ENCODING_MASK = 0x3F, 0x1F
_log = logging.getLogger("kvstore.nvme")


@dataclass(frozen=True)
class _OfSize:
    """See ``Regions.of_size``."""

    regions: Regions
    slot_bytes: int

    def __call__(self, residencies: NDArray[np.int64]) -> NDArray[np.bool_]:
        by_number = self.regions.by_number
        helps = np.zeros(max(by_number, default=0) + 2, np.bool_)  # the last one is no region's
        for number, region in by_number.items():
            helps[number] = region.slot_bytes == self.slot_bytes and not region.is_read_only
        found: NDArray[np.bool_] = helps[np.minimum(region_of(residencies), len(helps) - 1)]
        return found


class Regions:
    """All region files of a directory. Raises: Unavailable when the directory cannot be read."""

    def __init__(
        self, directory: Path, disk: Disk, io: DeviceIO, faults: FaultPoints, *, capacity_bytes: int,
        region_bytes: int, lender: Lender | None = None,
    ) -> None:  # fmt: skip
        self.capacity_bytes = capacity_bytes
        self._directory = directory
        self._region_bytes = region_bytes
        self._disk = disk
        self._files = Files(disk, io, lender or OwnThreads())
        self._faults = faults
        self.by_number: dict[int, RegionFile] = {}
        self.lost_bytes = 0
        self.hidden_bytes = 0
        """The most that files may take whose size the device did not say: no new file may take their room."""
        self.away: dict[str, int] = {}
        """Files that could not be opened, by name, and their bytes (0: the device did not say). They may come back with
        all that they hold."""
        self._numbers: set[int] = set()
        """Numbers of files that are there, or were: a record of ``newest`` about one file must not be applied to
        another."""
        self.shortage, self._short_bytes = "", 0
        """Why no new file is made, and what all files would take with the largest that found no room; 0: there is."""

    @property
    def file_bytes(self) -> int:
        return sum(region.file_bytes for region in self.by_number.values())

    # ------------------------------------------------------------ files

    def open_all(self) -> None:
        """Open the files that are there. A file that cannot be used is left alone, its bytes count as lost, and its
        chunks are misses until a start can open it. All slots count as free until ``claim``."""
        for name in self._disk.names(self._directory):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            self._numbers.add(int(match[1]))
            try:
                region = self._open(self._directory / name, int(match[1]), int(match[2]))
            except (OSError, ValueError) as error:
                _log.error("a region file cannot be used", extra={"file": name, "reason": str(error)})
                continue
            if region is None:
                self._remove_empty(self._directory / name)
                continue
            self.by_number[region.number] = region
            self._numbers.add(region.number)

    def avoid(self, names: Iterable[str], numbers: Iterable[int]) -> None:
        """Keep new files from getting one of these names, or numbers."""
        self._numbers.update(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))
        self._numbers.update(numbers)

    @property
    def away_numbers(self) -> list[int]:
        """Numbers of files that could not be opened."""
        return [int(match[1]) for name in self.away if (match := _NAME.fullmatch(name))]

    def unseen_places(self) -> list[int]:
        """Return the places (region << 32 | slot) that the device could not read."""
        regions = self.by_number.values()
        return [each.number << 32 | slot for each in regions for slot in each.unread - each.locked.keys()]

    def _remove_empty(self, path: Path) -> None:
        """Remove a file that holds no slots. If that fails the next start meets the file again."""
        try:
            self._disk.remove(path)
        except OSError as error:
            _log.error("a region file cannot be removed", extra={"file": path.name, "reason": str(error)})

    def _open(self, path: Path, number: int, slot_bytes: int) -> RegionFile | None:
        """Open one file. Its first page describes it, whatever its name; the name is used where the page is damaged.
        Returns None for a file without a first page in which no slot fits: a crash interrupted its making."""
        descriptor = size = -1
        try:
            descriptor = self._files.open(path, os.O_RDWR)
            size = self._disk.size(descriptor)
            said = self._files.read_head(descriptor) if size >= PAGE_BYTES else None
            there = max(0, size - PAGE_BYTES) // (said[1] if said else slot_bytes)
            if said is None and not there:
                self._files.close(descriptor)
                return None
            number, slot_bytes, slot_count = said or (number, slot_bytes, there)
            if slot_bytes % PAGE_BYTES or number >= REGION_COUNT_MAX:
                raise ValueError("no file of ours has slots of such a size, or such a number")
            if number in self.by_number:
                raise ValueError("another file is the same region")
            region = RegionFile(number, path, descriptor, slot_bytes, min(slot_count, there))
            region.free.extend(range(region.slot_count - 1, -1, -1))
            region.is_read_only = there < slot_count
            if said is None:
                self._files.write_head(region)
            self.lost_bytes += max(0, size - region.file_bytes)
            if said is None or region.is_read_only:
                _log.error("a region file was damaged", extra={"file": path.name, "slots_left": region.slot_count})
            return region
        except BaseException:
            if size < 0:
                self.hidden_bytes += max(self._region_bytes, PAGE_BYTES + slot_bytes)
            else:
                self.lost_bytes += size
            self.away[path.name] = max(size, 0)
            if descriptor >= 0:
                self._files.close(descriptor)
            raise

    def create(self, slot_bytes: int) -> RegionFile:
        """Make a new file for slots of one size: file and directory are synced before the first slot is used. Blocking.
        The first file of a size has fewer slots than usual where the file system has less room; later ones, which would
        become many, do not. Raises Exhausted when capacity or device have no room for one slot; OSError."""
        used = sum(each.slot_count for each in self.by_number.values() if each.slot_bytes == slot_bytes)
        count = max(FIRST_SLOT_COUNT, FIRST_REGION_BYTES // slot_bytes, used)
        count = min(count, max(1, (self._region_bytes - PAGE_BYTES) // slot_bytes))
        while True:
            count = min(count, (self._budget_bytes() - PAGE_BYTES) // slot_bytes)
            if count < 1:
                raise self.full()
            try:
                return self._make(slot_bytes, count)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if used or count == 1:
                    raise self._no_room(PAGE_BYTES + slot_bytes * count) from error
                count //= 2

    def _no_room(self, byte_count: int) -> Exhausted:
        """Return the error of a file system without room for a new file. It is logged once, until there is room again:
        where the tier evicts instead, no reply has the error."""
        reason = f"the file system of {self._directory} is full: free some room, or lower tiers.nvme.capacity_bytes"
        if not self._short_bytes:
            _log.warning("the device is full before the tier is", extra={"reason": reason, "lacking_bytes": byte_count})
        self.shortage, self._short_bytes = reason, max(self._short_bytes, self.file_bytes + byte_count)
        return Exhausted(reason)

    def _make(self, slot_bytes: int, count: int) -> RegionFile:
        """Make a file of so many slots. Raises OSError; nothing is left of the file then."""
        number = next(each for each in range(REGION_COUNT_MAX) if each not in self._numbers)
        path = self._directory / f"region-{number:05d}-{slot_bytes}.kvs"
        region = RegionFile(number, path, -1, slot_bytes, count, free=array("i", range(count - 1, -1, -1)))
        self._faults.reach("nvme.region.begin")
        try:
            region.descriptor = self._files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            self._faults.reach("nvme.region.opened")
            self._disk.allocate(region.descriptor, region.file_bytes)
            self._faults.reach("nvme.region.allocated")
            self._files.write_head(region)
            self._faults.reach("nvme.region.written")
            self._disk.sync(region.descriptor)
            self._disk.sync_directory(self._directory)
        except OSError:
            self._abandon(region)
            raise
        self._faults.reach("nvme.region.synced")
        self.by_number = {**self.by_number, number: region}  # a new table: the event loop may be iterating the old one
        self._numbers.add(number)
        if 0 < self._short_bytes <= self.file_bytes:  # a smaller file, or one in the place of another, shows no room
            self.shortage, self._short_bytes = "", 0
            _log.info("the device has room for the tier again")
        return region

    def _abandon(self, region: RegionFile) -> None:
        if region.descriptor < 0:
            return  # nothing was made; a file of this name is another's
        try:
            self._files.close(region.descriptor)
            self._disk.remove(region.path)
        except OSError:
            self.lost_bytes += region.file_bytes  # it stays behind as an unused file
            self._numbers.add(region.number)

    def idle_region(self, slot_bytes: int) -> RegionFile | None:
        """Return a file without used slots that does not serve this slot size, so that its room can be had; None
        without one."""
        for region in self.by_number.values():
            idle = not (region.used_count or region.readers or region.unread)
            if idle and (region.slot_bytes != slot_bytes or region.is_read_only):
                return region
        return None

    def retire(self, region: RegionFile) -> None:
        """Take an idle file out of use; ``remove_file`` follows. Until then its bytes count, and copies in it that were
        not erased may come back."""
        del self.by_number[region.number]
        self.away[region.path.name] = region.file_bytes
        self.lost_bytes += region.file_bytes

    def remove_file(self, region: RegionFile) -> None:
        """Remove a retired file. Blocking. Raises OSError; the file's bytes then count as lost until the next start,
        which may find it."""
        descriptor, region.descriptor = region.descriptor, -1  # another file may get this number
        self._files.close(descriptor)
        self.remove_away(region.path.name)

    def remove_away(self, name: str) -> None:
        """As ``remove_file``, for a file that is not open."""
        self._disk.remove(self._directory / name)
        self._disk.sync_directory(self._directory)
        self.lost_bytes -= self.away.pop(name)

    def surplus(self, held: dict[int, int]) -> list[str]:
        """Return the names of the files to give up when the capacity has shrunk: those that hold the least, until the
        others fit. ``held`` is the number of chunks in each region. Slots that could not be read count as chunks, and a
        file that could not be opened counts as full."""
        files = [(size - PAGE_BYTES, size, name) for name, size in self.away.items() if size]
        files += [
            ((held.get(each.number, 0) + len(each.unread)) * each.slot_bytes, each.file_bytes, each.path.name)
            for each in self.by_number.values()
        ]
        surplus: list[str] = []
        taken = self.file_bytes + self.lost_bytes
        for _, size, name in sorted(files, key=lambda each: each[0]):
            if taken <= self.capacity_bytes:
                break
            surplus.append(name)
            taken -= size
        return surplus

    def has_budget(self, slot_bytes: int) -> bool:
        """Return True when the capacity has room for a file with one slot of that size."""
        return self._budget_bytes() >= PAGE_BYTES + slot_bytes

    def full(self) -> Exhausted:
        """Return the error for a slot for which the capacity has no room."""
        return Exhausted(f"the NVMe tier is full: {remedy_of(self.by_number.values(), self.capacity_bytes)}")

    def could_hold(self, slot_bytes: int) -> bool:
        """Return True when the capacity would have room for such a file without the other files."""
        return self._budget_bytes() + self.file_bytes >= PAGE_BYTES + slot_bytes

    def _budget_bytes(self) -> int:
        return self.capacity_bytes - self.file_bytes - self.lost_bytes - self.hidden_bytes

    def close(self) -> None:
        for region in self.by_number.values():
            self._files.close(region.descriptor)
        self.by_number.clear()

    # ------------------------------------------------------------ slots

    def take(self, slot_bytes: int, encoding: Encoding, *, sealed: bool = False) -> Residency | None:
        """Return a free slot of that size, or None."""
        flags = encoding | (SEALED >> FLAGS_SHIFT if sealed else 0)
        for region in self.by_number.values():
            if region.slot_bytes == slot_bytes and region.free and not region.is_read_only:
                slot = region.free.pop()
                region.encodings[slot] = flags
                return flags << FLAGS_SHIFT | region.number << 32 | slot
        return None

    def slot_bytes_at(self, residency: Residency) -> int:
        """Return the size of the slot that another chunk could use if this one were given up; 0 when that would free
        none."""
        region = self.by_number.get(region_of(residency))
        return 0 if region is None or region.is_read_only else region.slot_bytes

    def of_size(self, slot_bytes: int) -> HelpingCopies:
        """Return ``slot_bytes_at`` == ``slot_bytes``, for many copies at once."""
        return _OfSize(self, slot_bytes)

    def in_the_way(self, slot_bytes: int) -> list[RegionFile]:
        """Return the regions that take the room of a new file for this slot size, and that no reader uses: regions of
        other sizes, or closed for writing. The region that holds the least comes first. Where the capacity has room for
        such a file, and so the file system has none, each is large enough for one slot by itself."""
        least = PAGE_BYTES + slot_bytes if self.has_budget(slot_bytes) else 0
        others = [
            each
            for each in self.by_number.values()
            if each.used_count
            and each.file_bytes >= least
            and not (each.readers or each.unread)
            and (each.slot_bytes != slot_bytes or each.is_read_only)
        ]
        return sorted(others, key=lambda each: each.used_count * each.slot_bytes)

    def free_count(self, slot_bytes: int) -> int:
        return sum(
            len(each.free)
            for each in self.by_number.values()
            if each.slot_bytes == slot_bytes and not each.is_read_only
        )

    def find(self, residency: Residency) -> tuple[RegionFile, int]:
        """Return (region, slot) of a copy. Raises Unavailable when its file is gone."""
        region = self.by_number.get(region_of(residency))
        slot = slot_of(residency)
        if region is None or slot >= region.slot_count:
            raise Unavailable("the region file of this chunk is gone", residency=residency)
        return region, slot

    def claim(self, residencies: NDArray[np.int64]) -> None:
        """Mark these slots, which were found on the device, as in use. The others stay free, except those that could
        not be read or are to be erased anew."""
        residencies = residencies[np.argsort(region_of(residencies), kind="stable")]
        numbers, slots = region_of(residencies), slot_of(residencies)
        for number, region in self.by_number.items():
            first, stop = np.searchsorted(numbers, [number, number + 1])
            used = slots[first:stop]
            is_free = np.ones(region.slot_count, np.bool_)
            is_free[used] = False
            is_free[list(region.unread | region.unerased)] = False
            region.free = array("i", np.flatnonzero(is_free)[::-1].astype(np.intc).tobytes())
            np.frombuffer(region.encodings, np.uint8)[used] = residencies[first:stop] >> FLAGS_SHIFT & FLAGS_MASK

    def give_back(self, region: RegionFile, slot: int) -> None:
        """Free a slot whose chunk is gone. While it is being read the slot is not used again."""
        if slot in region.readers:
            region.leaving.add(slot)
        else:
            region.free.append(slot)

    def quarantine(self, region: RegionFile, slot: int) -> None:
        """Keep a slot out of use: its copy failed a check. The oldest slot beyond the cap is used again."""
        region.quarantined.append(slot)
        if len(region.quarantined) > max(1, region.slot_count // QUARANTINE_SHARE):
            self.give_back(region, region.quarantined.pop(0))

    def keep_unerased(self, residency: Residency) -> None:
        """Keep a slot out of use until its copy is erased."""
        region = self.by_number.get(region_of(residency))
        if region is not None:  # else its file is gone, or away
            region.unerased.add(slot_of(residency))

    def rest(self, region: RegionFile, slot: int) -> None:
        """Put an ``unerased`` slot, which is erased now, into quarantine. A second call does nothing: the slot is freed
        once."""
        if slot not in region.unerased:
            return
        region.unerased.discard(slot)
        if self.by_number.get(region.number) is region:
            self.quarantine(region, slot)

    def begin_reading(self, region: RegionFile, slot: int) -> None:
        region.readers[slot] = region.readers.get(slot, 0) + 1

    def end_reading(self, region: RegionFile, slot: int) -> None:
        region.readers[slot] -= 1
        if region.readers[slot] == 0:
            del region.readers[slot]
            if slot in region.leaving:
                region.leaving.discard(slot)
                region.free.append(slot)
