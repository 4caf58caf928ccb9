"""What of a job crosses to the byte movers: memory that they have, whole runs of it, and nothing that is near it."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.seams.movers.crossing import NotLent, Packer


def test_only_runs_inside_lent_memory_cross() -> None:
    """What reaches over the end of one map would be something else in a mover's process."""
    room = np.zeros(16384, np.uint8)
    packer = Packer()
    packer.add_map(7, room[4096:8192])
    packer.add_map(9, room[12288:])
    assert packer.place(room[4096:8192]) == (7, 0, 4096)
    assert packer.place(room[5000:5001]) == (7, 904, 1)
    assert packer.place(room[16383:]) == (9, 4095, 1)
    for stranger in (
        room[:100],
        room[4000:4200],
        room[8100:8300],
        room[8192:8193],
        room[8192:12288],
        room[12000:13000],
    ):
        with pytest.raises(NotLent):
            packer.place(stranger)
    for odd in (room[4096:8192:2], room[4096:8192].reshape(64, 64), room[8191:4095:-1]):
        with pytest.raises(NotLent):
            packer.place(odd)
    packer.drop_map(7)
    with pytest.raises(NotLent):
        packer.place(room[4096:8192])
