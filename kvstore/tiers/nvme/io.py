"""Moves bytes between a file and memory, whole runs at a time. Blocking: byte movers call it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvstore.chunk import AEAD, Sealer, Sealing, StripMemory, write_seat
from kvstore.errors import DataLoss
from kvstore.seams import Disk
from kvstore.seams.memory import Bytes
from kvstore.units import PAGE_BYTES

IO_BYTES = 4 << 20
"""A device is at its full rate with requests of this size; larger ones only delay others."""
_ERASED_MAGIC = b"KVSERASE"


class DeviceIO(Protocol):
    """An I/O engine. Offsets and lengths are multiples of 4 KiB; memory may lie anywhere.

    Raises: OSError as the device does; DataLoss when the file ends before the run does.
    """

    def read(self, descriptor: int, offset: int, target: Bytes) -> None: ...

    def write(self, descriptor: int, offset: int, source: Bytes) -> None: ...


class PosixIO:
    """pread and pwrite through the Disk seam, with O_DIRECT where the descriptor was opened so: memory that is not
    page-aligned goes through an aligned buffer."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def read(self, descriptor: int, offset: int, target: Bytes) -> None:
        for start in range(0, target.size, IO_BYTES):
            part = target[start : start + IO_BYTES]
            into = part if _is_aligned(part) else aligned(part.size)
            done = 0
            while done < part.size:
                count = self._disk.pread(descriptor, into[done:].data, offset + start + done)
                if count <= 0:
                    raise DataLoss("the region file ends before its slots do", reason="truncated")
                done += count
            if into is not part:
                np.copyto(part, into)

    def write(self, descriptor: int, offset: int, source: Bytes) -> None:
        for start in range(0, source.size, IO_BYTES):
            part = source[start : start + IO_BYTES]
            if not _is_aligned(part):
                copy = aligned(part.size)
                np.copyto(copy, part)
                part = copy
            done = 0
            while done < part.size:
                count = self._disk.pwrite(descriptor, part[done:].data, offset + start + done)
                if count <= 0:
                    raise OSError(errno.EIO, "the device took no byte of a write")
                done += count


def _is_aligned(memory: Bytes) -> bool:
    return memory.ctypes.data % PAGE_BYTES == 0 and memory.flags.c_contiguous


def aligned(byte_count: int) -> Bytes:
    """Return page-aligned memory of ``byte_count`` bytes, not initialized."""
    room = np.empty(byte_count + PAGE_BYTES, np.uint8)
    start = -room.ctypes.data % PAGE_BYTES
    return room[start : start + byte_count]


def seated(runs: Sequence[Bytes], header_bytes: int, seat: int) -> list[Bytes]:
    """Return a chunk's runs of memory with a copy of the header (the first ``header_bytes``) that names its
    ``seat``."""
    header = aligned(header_bytes)
    np.copyto(header, runs[0][:header_bytes])
    write_seat(header, seat)
    return [each for each in (header, runs[0][header_bytes:], *runs[1:]) if each.size]


def write_runs(io: DeviceIO, descriptor: int, offset: int, runs: Sequence[Bytes]) -> None:
    """Write runs of memory one after the other. Blocking."""
    for run in runs:
        io.write(descriptor, offset, run)
        offset += run.size


def write_sealed(
    io: DeviceIO, descriptor: int, offset: int, header_bytes: int, sealing: Sealing, seat: int, header: Bytes,
    runs: Sequence[StripMemory],
) -> None:  # fmt: skip
    """Write a chunk in an envelope. ``runs`` are its body; its header takes ``header_bytes`` and is written last, for
    it has the tags of all. Blocking. Raises DataLoss, before the header is written, where memory does not match its
    checksums."""
    sealer, place = Sealer(sealing, header, seat), offset + header_bytes
    room = aligned(max(data.size for data, _ in runs)) if sealing.kind == AEAD else None
    for data, strips in runs:
        io.write(descriptor, place, sealer.body(data, strips, room))
        place += data.size
    io.write(descriptor, offset, sealer.header())


def _erased_page() -> Bytes:
    page = aligned(PAGE_BYTES)
    page[:] = 0
    page.data[: len(_ERASED_MAGIC)] = _ERASED_MAGIC
    return page


ERASED = _erased_page()
"""Stands in the place of a header that must not come back. It is no page of zeros: a start must tell an erased slot,
which is to be erased anew, from one that was never written."""


def is_erased(data: Bytes) -> bool:
    """Return True when a slot that begins like this was erased. The device itself may not have the erasure: only the
    process that synced it knows."""
    return data[: len(_ERASED_MAGIC)].tobytes() == _ERASED_MAGIC


def erase_at(io: DeviceIO, descriptor: int, offsets: Sequence[int]) -> None:
    """Overwrite the headers that begin at these offsets. Blocking."""
    for offset in offsets:
        io.write(descriptor, offset, ERASED)


def rewrite(io: DeviceIO, descriptor: int, offset: int, byte_count: int) -> None:
    """Read bytes, and write the same bytes again. Blocking."""
    data = aligned(byte_count)
    io.read(descriptor, offset, data)
    io.write(descriptor, offset, data)
