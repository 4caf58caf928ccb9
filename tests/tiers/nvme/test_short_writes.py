"""A disk that takes less than it is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.seams import SystemDisk
from kvstore.seams.disk import replace_whole
from kvstore.tiers.nvme.io import PosixIO, aligned
from kvstore.units import PAGE_BYTES


class _Taking(SystemDisk):
    """A disk that takes two pages, and then says of each write that it took nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def pwrite(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        self.asked += 1
        assert self.asked < 100, "it is asked for ever"
        return 0 if self.asked > 2 else super().pwrite(descriptor, buffer[:PAGE_BYTES], offset)


def test_a_write_of_which_nothing_is_taken_ends(tmp_path: Path) -> None:
    data = aligned(4 * PAGE_BYTES)
    data[:] = 7
    disk = _Taking()
    descriptor = disk.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    with pytest.raises(OSError, match="took no byte"):
        PosixIO(disk).write(descriptor, 0, data)
    disk.close(descriptor)
    assert (tmp_path / "file").read_bytes() == data[: 2 * PAGE_BYTES].tobytes()
    with pytest.raises(OSError, match="took no byte"):
        replace_whole(_Taking(), tmp_path / "file", data.tobytes())
    assert (tmp_path / "file").read_bytes() == data[: 2 * PAGE_BYTES].tobytes(), "the old content"
