"""Lives of a disk that end with a power cut, over many seeds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from tests.simulated import SimulatedDisk

HOME = Path("/home")

FILE = HOME / "file"

SEEDS = range(60)

OLD, NEW = b"o" * 4096, b"n" * 4096


def over_seeds(lived: Callable[[SimulatedDisk, int], None], seeds: range = SEEDS) -> list[SimulatedDisk]:
    """A disk per seed with OLD in FILE for good; then ``lived`` with the file open; then a power cut."""
    disks = []
    for seed in seeds:
        disk = SimulatedDisk(seed)
        disk.write_file(FILE, OLD)
        lived(disk, disk.open(FILE, os.O_RDWR))
        disk.crash()
        disks.append(disk)
    return disks


def outcomes(lived: Callable[[SimulatedDisk, int], None]) -> set[bytes]:
    return {disk.read_file(FILE) for disk in over_seeds(lived)}


def sectors(data: bytes) -> list[bytes]:
    return [data[start : start + 512] for start in range(0, len(data), 512)]
