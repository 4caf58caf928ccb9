"""Every job of byte movers that a shared tier gives away fails in turn, in every way: what is read is right to the bit
or fails, and afterwards all goes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.config import RedisSettings, S3Settings
from kvstore.errors import KVStoreError
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.tiers import SharedTier
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.s3 import Lanes, S3Tier
from tests.contracts.chunks import chunk
from tests.contracts.shared.redis_stand import server as redis_server
from tests.contracts.shared.s3_stand import server as s3_server
from tests.faulty_workers import WAYS, FaultyWorkers
from tests.tiers.redis.tiers import got, put

WHAT, OTHER = chunk(1), chunk(2)
STRIDE = 1 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 4
"""Each job fails in each of so many ways less; all ways come up over all jobs."""
FAILURES = (KVStoreError, MemoryError, RuntimeError, OSError)
"""What the ways of failing raise. That which is no error of ours is the movement's boundary to handle."""
Made = Callable[[FaultyWorkers, str], SharedTier]


def redis_tier(workers: FaultyWorkers, encoding: str) -> SharedTier:
    redis_server().client().flushall()
    settings = RedisSettings(url=redis_server().url, encoding=encoding)
    return RedisTier(settings, readers=workers, writers=workers, clock=SystemClock())


def s3_tier(workers: FaultyWorkers, encoding: str) -> SharedTier:
    at = s3_server()
    at.drop("jobs/")
    settings = S3Settings(
        bucket=at.bucket, prefix="jobs", endpoint_url=at.url, chunk_bytes_min=0, addressing="path", range_bytes=8192,
        encoding=encoding,
    )  # fmt: skip
    return S3Tier(settings, Lanes(workers, workers, workers, workers), SystemClock())


async def lived(tier: Any) -> None:
    """Write, look, read, check, remove. Raises what the tier raises."""
    await put(tier, WHAT)
    key = WHAT.header.storage_key
    await tier.probe([key], 5.0)
    await got(tier, WHAT)
    stored = await tier.open(WHAT.name)
    if stored is not None:
        await stored.check(range(len(WHAT.layout.slabs)))
        stored.close()
    await put(tier, OTHER)
    await tier.remove([OTHER.header.storage_key])


async def survived(make: Made, encoding: str, way: Any, target: int) -> int:
    """How many jobs a life has, of which one failed."""
    workers = FaultyWorkers(WorkerThreads(2, "jobs"))
    tier: Any = make(workers, encoding)
    if way is not None:
        workers.fail(way, target)
    try:
        try:
            await lived(tier)
        except FAILURES:
            assert way is not None
        count = len(workers.names)
        for what in (WHAT, OTHER):
            await put(tier, what)
            assert await got(tier, what)
    finally:
        await tier.close()
    return count


@pytest.mark.parametrize("encoding", ["raw", "auto"])
@pytest.mark.parametrize("make", [redis_tier, s3_tier])
def test_each_job_of_a_shared_tier_fails_in_turn(make: Made, encoding: str) -> None:
    """With ``auto`` the first chunks are tried in lz4 before they are written."""
    count = asyncio.run(survived(make, encoding, None, 0))
    assert count >= 4
    for target in range(count):
        for shift, way in enumerate(WAYS):
            if (target + shift) % STRIDE == 0:
                asyncio.run(survived(make, encoding, way, target))
