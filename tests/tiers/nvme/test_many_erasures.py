"""Very many chunks that must not come back, as when an operator clears a device: few syncs, and one place that the
device refuses keeps no other out of use."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvstore.spec import MissReason
from tests.scenario import scenario
from tests.simulated import SimulatedDisk
from tests.tiers.nvme.chains import PATHS, served, stored
from tests.tiers.service import DeviceService


def cleared(service: DeviceService) -> int:
    """Every chunk is given up for ever. Return how many there were."""
    rows = list(service.device.rows())
    for row in rows:
        service.controller.parts.movement.removal.remove(row, MissReason.EVICTED, erase=True)
    return len(rows)


@scenario()
async def test_many_erasures_share_a_sync(service: DeviceService) -> None:
    await stored(service)
    count = cleared(service)
    assert count == 2 * len(PATHS)
    with patch.object(service.disk, "sync", wraps=service.disk.sync) as sync:
        await service.nvme.tidy()
    assert sync.call_count == len(service.region_files()) < count / 4
    assert not service.nvme.statistics().chunk_count
    service.balance()
    await service.restart(kill=True)
    assert len(await served(service)) == len(PATHS)


def refusing(disk: SimulatedDisk, place: tuple[Path, int]) -> Any:
    """The device refuses every write to one place, for ever."""

    def pwrite(descriptor: int, buffer: memoryview, offset: int) -> int:
        if (disk._find(descriptor).path, offset) == place:
            raise OSError(errno.EIO, "a bad block")
        return SimulatedDisk.pwrite(disk, descriptor, buffer, offset)

    return patch.object(disk, "pwrite", pwrite)


def out_of_use(service: DeviceService) -> list[int]:
    return [slot for each in service.nvme.regions.by_number.values() for slot in each.unerased]


@scenario()
async def test_one_place_that_cannot_be_erased_keeps_no_other_out_of_use(service: DeviceService) -> None:
    """Neither when chunks are given up, nor when a start erases anew what an earlier process erased."""
    await stored(service)
    place = service.place(*PATHS[0])
    with refusing(service.disk, place):
        cleared(service)
        await service.nvme.tidy()
        assert len(out_of_use(service)) == 1
        assert not service.nvme.statistics().chunk_count
        service.balance()
    await service.nvme.tidy()
    with refusing(service.disk, place):
        await service.restart(kill=True)
        assert len(out_of_use(service)) == 1
    assert len(await served(service)) == len(PATHS)
    service.balance()
