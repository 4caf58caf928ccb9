"""How fast tiers are read, measured: in a service of its own, and by hand."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.movement import TierMeters
from kvstore.spec import Tier
from tests.scenario import scenario
from tests.simulated.clock import ManualClock
from tests.tiers.service import DeviceService

MIB = 1 << 20
PATH = (1, 2, 3, 4, 5, 6)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def meters(clock: ManualClock) -> TierMeters:
    return TierMeters(clock)


def test_reads_side_by_side_are_one_busy_time(clock: ManualClock, meters: TierMeters) -> None:
    for _ in range(4):
        meters.began("nvme", Tier.NVME, MIB)
    (tier,) = meters.tiers
    assert (tier.queued_bytes, tier.rate.sample_count) == (4 * MIB, 0)
    clock.advance(0.1)
    for _ in range(4):
        meters.ended("nvme", MIB, has_come=True)
    (tier,) = meters.tiers
    assert (tier.queued_bytes, tier.rate.sample_count) == (0, 1)
    assert tier.rate.bytes_per_s == pytest.approx(40 * MIB)


def test_the_time_between_reads_does_not_count(clock: ManualClock, meters: TierMeters) -> None:
    for _ in range(3):
        meters.began("nvme", Tier.NVME, MIB)
        clock.advance(0.1)
        meters.ended("nvme", MIB, has_come=True)
        clock.advance(100.0)
    (tier,) = meters.tiers
    assert (tier.rate.sample_count, tier.rate.bytes_per_s) == (3, pytest.approx(10 * MIB))


def test_a_tier_that_is_never_idle_is_measured_every_second(clock: ManualClock, meters: TierMeters) -> None:
    meters.began("nvme", Tier.NVME, MIB)
    for _ in range(9):
        meters.began("nvme", Tier.NVME, MIB)
        clock.advance(0.25)
        meters.ended("nvme", MIB, has_come=True)
    (tier,) = meters.tiers
    assert (tier.rate.sample_count, tier.rate.bytes_per_s) == (2, pytest.approx(4 * MIB))


def test_what_came_too_late_makes_a_rate_slower_and_what_was_damaged_does_not(
    clock: ManualClock, meters: TierMeters
) -> None:
    def read(seconds: float, **how: bool) -> float:
        meters.began("s3", Tier.S3, MIB)
        clock.advance(seconds)
        meters.ended("s3", MIB, **how)
        return meters.tiers[0].rate.seconds(MIB)

    assert read(0.1, has_come=True) == pytest.approx(0.1)
    assert read(0.5, has_come=False) == pytest.approx(0.1)
    assert read(0.5, has_come=False, is_late=True) > 0.2


def test_reads_that_are_given_up_do_not_make_a_tier_look_faster(clock: ManualClock, meters: TierMeters) -> None:
    """A client that begins and cancels again and again, beside a read of ten seconds."""
    meters.began("nvme", Tier.NVME, 10 * MIB)
    for _ in range(9):
        meters.began("nvme", Tier.NVME, MIB)
        clock.advance(1.1)
        meters.ended("nvme", MIB, has_come=False)
    clock.advance(0.1)
    meters.ended("nvme", 10 * MIB, has_come=True)
    (tier,) = meters.tiers
    assert (tier.rate.sample_count, tier.rate.bytes_per_s) == (1, pytest.approx(MIB))


@scenario(lambda: DeviceService(arena_chunks=32))
async def test_a_device_is_measured_as_it_is_read(service: DeviceService) -> None:
    await service.keep(*PATH)
    meters = service.controller.parts.meters
    assert [each.rate.sample_count for each in meters.tiers] == [0], "it is in use, and was not read"
    service.forget_memory()
    assert (await service.fetch(*PATH))[0] == len(PATH)
    await asyncio.sleep(1.0)  # the readers have theirs; the reads end
    (tier,) = service.controller.stats().rates
    assert (tier.name, tier.kind, tier.queued_bytes) == ("nvme", Tier.NVME, 0)
    assert tier.rate.sample_count >= 1
    assert meters.is_changed
