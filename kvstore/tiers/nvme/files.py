"""Opens one region file on the device, and reads and writes its first page."""

from __future__ import annotations

import errno
import logging
import os
import struct
from pathlib import Path

import xxhash

from kvstore.seams import Disk, Lender
from kvstore.tiers.nvme.directory import FORMAT
from kvstore.tiers.nvme.io import DeviceIO, aligned
from kvstore.tiers.nvme.slots import RegionFile
from kvstore.units import PAGE_BYTES

MAGIC = b"KVSREGIN"
_HEAD = struct.Struct("<8sHHIQQQ")
_log = logging.getLogger("kvstore.nvme")


class Files:
    """Opens region files, and reads and writes their first pages. It keeps no account of them."""

    def __init__(self, disk: Disk, io: DeviceIO, lender: Lender) -> None:
        self._disk = disk
        self._io = io
        self._lender = lender
        self._is_direct = True

    def open(self, path: Path, flags: int) -> int:
        """Open for direct I/O, or buffered where the file system has none; byte movers may use the descriptor."""
        descriptor = self._opened(path, flags)
        try:
            return self._lender.lend(descriptor)
        except BaseException:
            self._disk.close(descriptor)
            if flags & os.O_CREAT:
                self._disk.remove(path)  # else the next try finds its name taken
            raise

    def _opened(self, path: Path, flags: int) -> int:
        if self._is_direct:
            try:
                return self._disk.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._is_direct = False
                flags &= ~os.O_EXCL  # some kernels leave the file behind when they refuse
                _log.warning("this file system has no direct I/O: reads and writes go through the page cache")
        return self._disk.open(path, flags)

    def close(self, descriptor: int) -> None:
        """Close a descriptor, after the byte movers have let go of it. Raises OSError."""
        self._lender.take_back(descriptor)
        self._disk.close(descriptor)

    def read_head(self, descriptor: int) -> tuple[int, int, int] | None:
        """Return (number, slot bytes, slot count), or None when the page is damaged. Raises ValueError for a newer
        format."""
        page = aligned(PAGE_BYTES)
        self._io.read(descriptor, 0, page)
        head = page[: _HEAD.size].tobytes()
        magic, _, reader, number, slot_bytes, slot_count, features = _HEAD.unpack(head)
        checksum = page[_HEAD.size : _HEAD.size + 8].tobytes()
        if magic != MAGIC or not slot_bytes or checksum != xxhash.xxh3_64_digest(head):
            return None
        if reader > FORMAT or features:
            raise ValueError("it was written by a newer release")
        return number, slot_bytes, slot_count

    def write_head(self, region: RegionFile) -> None:
        """Write a region's first page. Blocking; does not sync. Raises OSError."""
        head = _HEAD.pack(MAGIC, FORMAT, FORMAT, region.number, region.slot_bytes, region.slot_count, 0)
        page = aligned(PAGE_BYTES)
        page[:] = 0
        page.data[: len(head)] = head
        page.data[len(head) : len(head) + 8] = xxhash.xxh3_64_digest(head)
        self._io.write(region.descriptor, 0, page)
