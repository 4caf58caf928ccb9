"""A file system that is full before the tier is."""

from __future__ import annotations

import asyncio
import errno
import logging

import pytest

from kvstore.movement.parked import RETRY_S
from kvstore.movement.refusals import TOLD_S
from kvstore.spec import LayerSpec
from tests.scenario import scenario
from tests.specs import small_spec
from tests.tiers.service import KIB, DeviceService

LARGE = small_spec(model_id="large", layers=(LayerSpec(kv_heads=2, k_dim=64, v_dim=64),) * 8)


@scenario(lambda: DeviceService(arena_chunks=32))
async def test_a_device_that_is_full_before_the_tier_is_says_so_once_in_the_log_and_for_as_long_as_it_is(
    service: DeviceService, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier evicts instead, and every store is well: nobody else would say it."""

    def problem() -> str:
        (found,) = [each.problem for each in service.parts.movement.accounts() if each.stats.name == "nvme"]
        return found

    def told() -> list[str]:
        said = "the device is full before the tier is"
        return [each.__dict__["reason"] for each in caplog.records if each.message == said]

    await service.keep(1)
    for _ in range(2):
        service.disk.fail("allocate", errno.ENOSPC, path_contains="region", times=None)
        for number in range(100, 130):
            await service.keep(number)
        assert problem() == told()[-1]
        service.disk.mend()
        for number in range(200, 230):
            await service.keep(number)
        assert problem() == ""
    assert len(told()) == 2
    assert told()[0].endswith("is full: free some room, or lower tiers.nvme.capacity_bytes")


def test_files_that_still_fit_do_not_end_what_the_log_says_of_a_full_device(caplog: pytest.LogCaptureFixture) -> None:
    """Chunks of another model are smaller: their files fit, or take the place of others."""
    service = DeviceService(arena_chunks=256, capacity_bytes=1 << 20)
    said = ["the device is full before the tier is", "the device has room for the tier again"]

    def told() -> list[str]:
        return [each.message for each in caplog.records if each.message in said]

    async def scenario() -> None:
        large = service.of(LARGE)
        await large.keep(1)
        service.disk.capacity_bytes = service.region_bytes_used() + 40 * KIB
        for number in range(100, 140):
            await (service if number % 8 == 7 else large).keep(number)
        assert told() == said[:1]
        service.disk.capacity_bytes = None
        for number in range(200, 300):
            await large.keep(number)
        assert told() == said

    with caplog.at_level(logging.INFO):
        service.run(scenario)


def test_small_chunks_that_are_taken_do_not_end_what_the_log_says_of_large_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = DeviceService(arena_chunks=256, capacity_bytes=64 * KIB)

    def told() -> list[str]:
        return [each.message for each in caplog.records if "takes" in each.message]

    async def scenario() -> None:
        large = service.of(LARGE)
        for number in range(1, 20):
            await large.store(large.session, number)
            await service.keep(number)
            await asyncio.sleep(TOLD_S / 4)
        assert told() == ["a tier takes no chunks for now"]
        for row in [row for row in service.mapped.rows() if row not in service.device]:
            service.drop(row)
        await asyncio.sleep(3 * RETRY_S)
        await service.keep(20)
        assert told()[1:] == ["the tier takes chunks again"], "nothing waits any more that it refused"

    with caplog.at_level(logging.INFO):
        service.run(scenario)


def test_a_large_chunk_that_leaves_after_a_small_one_was_taken_ends_what_the_log_says(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else the same reason would not be logged again for as long as only small chunks are stored."""
    service = DeviceService(arena_chunks=256, capacity_bytes=64 * KIB)

    async def scenario() -> None:
        large = service.of(LARGE)
        await large.store(large.session, 1)
        await asyncio.sleep(1.0)
        await service.keep(1)
        for row in [row for row in service.mapped.rows() if row not in service.device]:
            service.drop(row)
        await asyncio.sleep(3 * RETRY_S)
        await service.keep(2)
        told = [each.message for each in caplog.records if "takes" in each.message]
        assert told == ["a tier takes no chunks for now", "the tier takes chunks again"]

    with caplog.at_level(logging.INFO):
        service.run(scenario)
