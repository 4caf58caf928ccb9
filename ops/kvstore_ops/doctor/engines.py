"""Checks of Redis by its own INFO, and of the running sidecar's tiers, S3 among them, by their reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.config import RedisAddress, Settings
from kvstore.errors import KVStoreError
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.doctor.finding import Finding, Health

ANSWER_S_MAX = 5.0
VERSION_MIN = (6, 2)
SKEW_S_MAX = 5.0
FORK_MS_MAX = 100.0
BUFFERS = "client-output-buffer-limit"
BUFFER_BYTES_MIN = 64 << 20
"""Several fields of a chunk may wait for one connection."""


def look_at_redis(settings: Settings) -> Iterator[Finding]:
    """Check the server of tiers.redis.url: its version, memory, policy and clock."""
    redis = settings.tiers.redis
    if not redis.url:
        why = "the sidecar runs it itself (tiers.redis.embedded)" if redis.embedded else "tiers.redis.url is not set"
        yield Finding("redis", Health.UNSEEN, why)
        return
    address = RedisAddress.of(redis.url)
    try:
        answers = asyncio.run(_asked(settings, address))
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an engine or its client does is a finding
        reason = error.message if isinstance(error, KVStoreError) else str(error) or type(error).__name__
        yield Finding(
            "redis", Health.BAD, f"tiers.redis.url does not answer: {reason}",
            "chunks are shared with nobody, and lookups wait for it a few times",
            "start it, or mend tiers.redis.url, username or password_file",
        )  # fmt: skip
        return
    if answers.cluster is not None:
        yield cluster_tells(answers.cluster)
    seen = set[Finding]()
    for told in answers.servers:  # a cluster's servers are mostly alike
        for finding in redis_tells(told, answers.engine_s, answers.now_s):
            if finding not in seen:
                yield finding
            seen.add(finding)


class Answers(NamedTuple):
    """The INFO of each server that takes writes, of a single one with its output buffers' limits; the clock of one,
    beside ours; and of a cluster its CLUSTER INFO."""

    servers: Sequence[Mapping[str, Any]]
    engine_s: float
    now_s: float
    cluster: Mapping[str, str] | None = None


async def _asked(settings: Settings, address: RedisAddress) -> Answers:
    from kvstore.tiers.redis.topology import topology_of

    topology = topology_of(settings.tiers.redis, address, 1)
    client = topology.client
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            if address.kind != "cluster":
                told = {**await client.info(), BUFFERS: await _buffers(client)}
                seconds, microseconds = await client.time()
                return Answers([told], seconds + microseconds / 1e6, time.time())
            await client.initialize()
            state = await client.cluster_info()
            nodes = client.get_primaries()
            infos = [dict(await client.info(target_nodes=each)) for each in nodes]
            seconds, microseconds = await client.time(target_nodes=nodes[0])
            return Answers(infos, seconds + microseconds / 1e6, time.time(), dict(state))
    finally:
        await topology.close()


async def _buffers(client: Any) -> str | None:
    """Return the limits of replies that wait for their readers; None where this user may not ask for them."""
    from redis.exceptions import ResponseError

    try:
        found = await client.config_get(BUFFERS)
    except ResponseError:
        return None
    return str(dict(found).get(BUFFERS, ""))


def cluster_tells(told: Mapping[str, Any]) -> Finding:
    """Check a cluster's state. ``told``: its CLUSTER INFO."""
    state, failed = str(told.get("cluster_state", "?")), int(told.get("cluster_slots_fail") or 0)
    said = f"state {state}, {told.get('cluster_known_nodes', '?')} nodes, {failed:,} slots without a server"
    if state == "ok" and not failed:
        return Finding("redis cluster", Health.GOOD, said)
    return Finding(
        "redis cluster", Health.BAD, said, "chunks of these slots, or all, neither go there nor come from there",
        "redis-cli --cluster check HOST:PORT names the slots; redis-cli --cluster fix HOST:PORT gives them a server",
    )  # fmt: skip


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
    yield from _forks(told)
    yield from _waiting_replies(told)
    skew_s = abs(engine_s - now_s)
    if skew_s > SKEW_S_MAX:
        yield Finding(
            "redis clock", Health.WEAK, f"its clock and ours are {skew_s:.0f} s apart",
            "which nodes live is told by it: they seem dead, or seem to live on",
            "have both follow the same time servers: timedatectl set-ntp true",
        )  # fmt: skip


def _forks(told: Mapping[str, Any]) -> Iterator[Finding]:
    """Check what the last fork took, while which the server answered nobody."""
    fork_ms = int(told.get("latest_fork_usec") or 0) / 1e3
    if fork_ms > FORK_MS_MAX:
        yield Finding(
            "redis forks", Health.WEAK, f"the last fork took {fork_ms:.0f} ms",
            "it answers nobody meanwhile, so lookups go without it, and every page written during a save costs memory",
            "CONFIG SET save ''; CONFIG SET appendonly no; and no replica that syncs often",
        )  # fmt: skip


def _waiting_replies(told: Mapping[str, Any]) -> Iterator[Finding]:
    """Check the limit on replies that wait for a client: a reply with a chunk's bytes is large."""
    if BUFFERS not in told:
        return
    if told[BUFFERS] is None:
        yield Finding("redis buffers", Health.UNSEEN, f"CONFIG GET {BUFFERS} is denied to this user")
        return
    words = str(told[BUFFERS]).split()
    at = words.index("normal") if "normal" in words else -4
    limits = [int(each) for each in words[at + 1 : at + 3] if each.isdigit()]
    least = min((each for each in limits if each), default=0)
    if at >= 0 and least and least < BUFFER_BYTES_MIN:
        yield Finding(
            "redis buffers", Health.BAD, f"{BUFFERS} of normal clients is {format_bytes(least)}",
            "it closes connections in the middle of chunks that are read, which then are misses",
            f"CONFIG SET {BUFFERS} 'normal 0 0 0'",
        )  # fmt: skip
    else:
        yield Finding("redis buffers", Health.GOOD, "replies may wait for their readers")


def look_at_settings(report: admin_pb2.TiersResponse, settings: Settings) -> Iterator[Finding]:
    """Find the shared tiers that the sidecar has and these settings do not: their rights and limits were not looked
    at."""
    tiers = settings.tiers
    known = {"redis": bool(tiers.redis.url or tiers.redis.embedded), "s3": bool(tiers.s3.bucket)}
    for each in report.tiers:
        if each.stats.is_shared and not known.get(each.stats.name):
            yield Finding(
                f"settings of {each.stats.name}", Health.WEAK, "the sidecar has this tier, and these settings do not",
                "its credentials, rights and limits were not looked at",
                "run this with the sidecar's own --config and environment",
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
        elif stats.quarantined_bytes:
            yield Finding(
                what, Health.WEAK, f"up, {format_bytes(stats.quarantined_bytes)} of it quarantined",
                "copies there failed a check, could not be read, or are sealed with a key that is not here: they are "
                "misses that take room",
                "see the service's log since its start: it names what is damaged, or what is missing, as a key of "
                "tenants.NAME.envelope_key_file",
            )  # fmt: skip
        else:
            yield Finding(what, Health.GOOD, f"up, {tier.backlog_chunk_count:,} chunks wait for it")
    for reason in found.absent:
        yield Finding("absent tier", Health.BAD, reason, "the service runs without it", "mend what the message names")
