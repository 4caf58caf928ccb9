"""Checks of Redis by its own INFO, and of the running sidecar's tiers, S3 among them, by their reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import Any

from kvstore.config import RedisAddress, Settings
from kvstore.errors import KVStoreError
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.doctor.finding import Finding, Health

ANSWER_S_MAX = 5.0
VERSION_MIN = (6, 2)
SKEW_S_MAX = 5.0


def look_at_redis(settings: Settings) -> Iterator[Finding]:
    """Check the server of tiers.redis.url: its version, memory, policy and clock."""
    redis = settings.tiers.redis
    if not redis.url:
        yield Finding("redis", Health.UNSEEN, "tiers.redis.url is not set")
        return
    address = RedisAddress.of(redis.url)
    if address.kind == "cluster":
        yield Finding("redis", Health.UNSEEN, "a cluster: ask each of its nodes, and see kvstore tiers")
        return
    try:
        told, now_s = asyncio.run(_asked(settings, address))
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an engine or its client does is a finding
        reason = error.message if isinstance(error, KVStoreError) else str(error) or type(error).__name__
        yield Finding(
            "redis", Health.BAD, f"tiers.redis.url does not answer: {reason}",
            "chunks are shared with nobody, and lookups wait for it a few times",
            "start it, or mend tiers.redis.url, username or password_file",
        )  # fmt: skip
        return
    yield from redis_tells(told, now_s, time.time())


async def _asked(settings: Settings, address: RedisAddress) -> tuple[dict[str, Any], float]:
    from kvstore.tiers.redis.topology import topology_of

    topology = topology_of(settings.tiers.redis, address, 1)
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            told = await topology.client.info()
            seconds, microseconds = await topology.client.time()
        return dict(told), seconds + microseconds / 1e6
    finally:
        await topology.close()


def redis_tells(told: Mapping[str, Any], engine_s: float, now_s: float) -> Iterator[Finding]:
    """Check a server's answers. ``told``: its INFO; ``engine_s``: its clock at ``now_s`` of our clock."""
    said = str(told.get("redis_version", "?"))
    version = tuple(int(each) for each in said.split(".")[:2] if each.isdigit())
    if version < VERSION_MIN:
        yield Finding(
            "redis", Health.WEAK, f"version {said}", "it is older than what the tier is tested with",
            "use Redis or Valkey 6.2 or newer",
        )  # fmt: skip
    else:
        yield Finding("redis", Health.GOOD, f"version {said}")
    capacity, policy = int(told.get("maxmemory") or 0), str(told.get("maxmemory_policy", "?"))
    if not capacity:
        yield Finding(
            "redis memory", Health.WEAK, "maxmemory is 0", "it grows until its machine has no memory left",
            "CONFIG SET maxmemory 8gb (what it may take), and in redis.conf",
        )  # fmt: skip
    elif policy == "noeviction":
        yield Finding(
            "redis memory", Health.WEAK, f"maxmemory {format_bytes(capacity)}, policy {policy}",
            "when it is full it refuses chunks instead of dropping old ones",
            "CONFIG SET maxmemory-policy allkeys-lru, or volatile-lru where others use it, too",
        )  # fmt: skip
    else:
        yield Finding("redis memory", Health.GOOD, f"maxmemory {format_bytes(capacity)}, policy {policy}")
    if told.get("aof_enabled") or int(told.get("rdb_bgsave_in_progress") or 0):
        yield Finding(
            "redis disk", Health.WEAK, "it writes to its disk (appendonly, or a snapshot now)",
            "chunks are a cache: a fork of a large Redis takes memory and stops it for a while",
            "CONFIG SET appendonly no; CONFIG SET save '' where nothing else is kept there",
        )  # fmt: skip
    skew_s = abs(engine_s - now_s)
    if skew_s > SKEW_S_MAX:
        yield Finding(
            "redis clock", Health.WEAK, f"its clock and ours are {skew_s:.0f} s apart",
            "which nodes live is told by it: they seem dead, or seem to live on",
            "have both follow the same time servers: timedatectl set-ntp true",
        )  # fmt: skip


def look_at_tiers(found: admin_pb2.TiersResponse) -> Iterator[Finding]:
    """Check the sidecar's tiers by their own reports."""
    for tier in found.tiers:
        stats = tier.stats
        what, why = f"tier {stats.name}", "chunks are not written there, and perhaps not read"
        remedy = "see the message; kvstore tiers shows when it is well again"
        if tier.is_draining:
            ended = f"kvstore drain --tier {stats.name} --end"
            yield Finding(what, Health.WEAK, "an operator drains it", "it takes no chunks", ended)
        elif tier.problem:
            yield Finding(what, Health.BAD, tier.problem, why, remedy)
        elif stats.state != "up" or tier.stalled_seconds > ANSWER_S_MAX:
            said = f"{stats.state}; silent for {tier.stalled_seconds:.0f} s"
            yield Finding(what, Health.BAD, said, why, remedy)
        else:
            yield Finding(what, Health.GOOD, f"up, {tier.backlog_chunk_count:,} chunks wait for it")
    for reason in found.absent:
        yield Finding("absent tier", Health.BAD, reason, "the service runs without it", "mend what the message names")
