"""The device tier's directory: its file system, direct I/O, room and rate."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore.config import Settings
from kvstore.config.machine import device_room_bytes
from kvstore.seams import SystemDisk
from kvstore.server.tiers import COPY_ON_WRITE
from kvstore.units import format_bytes
from kvstore_ops.doctor.finding import Finding, Health

SAMPLE_BYTES = 16 << 20
PIECE_BYTES = 1 << 20
RATE_MIN = 100e6


def look_at_device(settings: Settings) -> Iterator[Finding]:
    """Check the device tier's directory: write a sample of 16 MiB beside the tier's files, read it, and remove it."""
    nvme = settings.tiers.nvme
    if not nvme.capacity_bytes:
        yield Finding(
            "device", Health.UNSEEN, "tiers.nvme.capacity_bytes is 0: nothing survives a restart",
        )  # fmt: skip
        return
    there = next(each for each in (nvme.directory, *nvme.directory.parents) if each.is_dir())
    kind = SystemDisk().file_system(there)
    if kind in COPY_ON_WRITE:
        yield Finding(
            "file system", Health.WEAK, f"{there} is on {kind}",
            "it writes to new places: room taken in advance is no promise, and rates suffer",
            "put tiers.nvme.directory on ext4 or xfs, or switch it off for the directory (chattr +C)",
        )  # fmt: skip
    else:
        yield Finding("file system", Health.GOOD, f"{there} is on {kind}")
    yield _room(settings)
    try:
        yield from _rates(there)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        yield Finding(
            "device rate", Health.BAD, f"{there}: {error.strerror}", "the device tier cannot write there",
            "free some of the device" if is_full else f"let the service's user write to {there}, or set "
            "tiers.nvme.directory",
        )  # fmt: skip


def _room(settings: Settings) -> Finding:
    nvme = settings.tiers.nvme
    room = device_room_bytes(nvme.directory)
    said = f"{format_bytes(room)} for {format_bytes(nvme.capacity_bytes)} of tiers.nvme.capacity_bytes"
    if room < nvme.capacity_bytes:
        return Finding(
            "device room", Health.BAD, said, "chunks are refused, or never written, once the device is full",
            "free some of the device, or lower tiers.nvme.capacity_bytes",
        )  # fmt: skip
    return Finding("device room", Health.GOOD, said)


def _rates(directory: Path) -> Iterator[Finding]:
    path = directory / f".doctor-{secrets.token_hex(8)}"
    descriptor, is_direct = _opened(path)
    try:
        yield _direct(is_direct=is_direct)
        piece = mmap.mmap(-1, PIECE_BYTES)  # its address is a page boundary, as direct I/O needs
        piece.write(os.urandom(PIECE_BYTES))
        began_s = time.perf_counter()
        for offset in range(0, SAMPLE_BYTES, PIECE_BYTES):
            os.pwrite(descriptor, piece, offset)
        os.fdatasync(descriptor)
        written_s = time.perf_counter() - began_s
        if not is_direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        for offset in range(0, SAMPLE_BYTES, PIECE_BYTES):
            os.preadv(descriptor, [piece], offset)
        yield _rate("device writes", SAMPLE_BYTES / written_s)
        yield _rate("device reads", SAMPLE_BYTES / (time.perf_counter() - began_s))
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _direct(*, is_direct: bool) -> Finding:
    if is_direct:
        return Finding("direct I/O", Health.GOOD, "the file system has it")
    return Finding(
        "direct I/O", Health.WEAK, "the file system has none",
        "bytes go through the page cache, which costs a copy and memory beside the arena",
        "put tiers.nvme.directory on ext4 or xfs of a local device",
    )  # fmt: skip


def _rate(subject: str, rate: float) -> Finding:
    said = f"{rate / 1e6:,.0f} MB/s, of a sample of {format_bytes(SAMPLE_BYTES)}"
    if rate < RATE_MIN:
        return Finding(
            subject, Health.WEAK, said, "stores wait long for LOCAL, and fetches from the device may take longer than "
            "computing the prompt again", "use a local NVMe device, or look what else is using this one (iostat -x 1)",
        )  # fmt: skip
    return Finding(subject, Health.GOOD, said)


def _opened(path: Path) -> tuple[int, bool]:
    """Create a file that was not there, and follow no link: others may be able to write to the directory. Return its
    descriptor, and whether it has direct I/O."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # some file systems make the file before they refuse direct I/O
    return os.open(path, flags, 0o600), False
