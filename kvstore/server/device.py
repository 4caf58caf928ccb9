"""The device tier on the real world: directory, files, threads of its own."""

from __future__ import annotations

import logging

from kvstore.config import NvmeSettings
from kvstore.seams import Clock, Disk, FaultPoints, Workers, WorkerThreads
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.spec import Encoding
from kvstore.tiers.nvme import Directory, NvmeTier, PosixIO, Regions

COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
_log = logging.getLogger("kvstore.nvme")


def open_nvme(
    settings: NvmeSettings, disk: Disk, clock: Clock, faults: FaultPoints, movers: Workers, owner: str = ""
) -> NvmeTier:
    """The tier, not recovered yet; ``movers`` check what it reads, ``owner`` is Directory's.

    Raises: FutureFormat, ForeignDirectory; Unavailable, OSError when the directory cannot be had."""
    directory = Directory(settings.directory, disk, faults, owner)
    kind = disk.file_system(settings.directory)
    if kind in COPY_ON_WRITE:
        _log.warning(
            "tiers.nvme.directory lies on a copy-on-write file system: writes go to new places, so room taken in "
            "advance is no promise and rates suffer; use ext4 or xfs, or switch it off for the directory (chattr +C)",
            extra={"file_system": kind},
        )
    io = PosixIO(disk)
    regions = Regions(
        settings.directory, disk, io, faults,
        capacity_bytes=settings.capacity_bytes, region_bytes=settings.region_bytes,
    )  # fmt: skip
    return NvmeTier(
        directory, regions, disk=disk, io=io, clock=clock, faults=faults,
        readers=WorkerThreads(settings.reader_count, "nvme-read", nice=MOVER_NICE),
        writers=WorkerThreads(settings.writer_count, "nvme-write", nice=MOVER_NICE),
        checkers=movers,
        encoding=Encoding.LZ4 if settings.encoding == "lz4" else Encoding.RAW,
    )  # fmt: skip
