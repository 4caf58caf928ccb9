"""A file system that is full before the tier is."""

from __future__ import annotations

import errno

import pytest

from tests.tiers.service import DeviceService


def test_a_device_that_is_full_before_the_tier_is_says_so_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The tier evicts instead, and every store is well: nobody else would say it."""
    service = DeviceService(arena_chunks=32)

    def told() -> list[str]:
        said = "the device is full before the tier is"
        return [each.__dict__["reason"] for each in caplog.records if each.message == said]

    async def scenario() -> None:
        await service.keep(1)
        for _ in range(2):
            service.disk.fail("allocate", errno.ENOSPC, path_contains="region", times=None)
            for number in range(100, 130):
                await service.keep(number)
            service.disk.mend()
            for number in range(200, 230):
                await service.keep(number)
        assert len(told()) == 2
        assert told()[0].endswith("KiB more: free some, or lower tiers.nvme.capacity_bytes")

    service.run(scenario)
