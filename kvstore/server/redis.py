"""Builds the Redis tier, on the server that settings name or on an embedded one, and the directory of nodes."""

from __future__ import annotations

from kvstore.config import RedisAddress, Settings
from kvstore.directory import NodeDirectory
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.server.descriptors import Need
from kvstore.server.trust import trust_of
from kvstore.server.world import TierOwner, World
from kvstore.tiers import SharedUse, WritePolicy
from kvstore.tiers.redis.embedded import EmbeddedServer


def build_redis(settings: Settings, world: World, owner: TierOwner) -> SharedUse | None:
    """Build the tier; see ``Builder``. It is built even if its server cannot be reached, because the server may come
    later. Each tenant has an embedded server of its own. Raises Unavailable where that cannot be started."""
    redis = settings.tiers.redis
    if not redis.is_on:
        return None
    from kvstore.tiers.redis.reads import JOB_BYTES_MAX  # redis-py costs memory and time: only where it is used
    from kvstore.tiers.redis.tier import RedisTier

    trust = trust_of("redis", redis.envelope, owner)
    own = None
    if redis.embedded:
        own = EmbeddedServer(
            settings.server.state_directory / "redis" / (owner.name or "default"), redis.embedded_bytes
        )
        own.start()
    tier = RedisTier(
        redis, clock=world.clock, own=own, trust=trust,
        readers=world.movers.lane("redis-read", redis.reader_count, nice=MOVER_NICE),
        writers=world.movers.lane("redis-write", redis.writer_count, nice=MOVER_NICE),
    )  # fmt: skip
    tier.begin()
    write = WritePolicy(redis.write)
    return SharedUse(tier=tier, lookup_s_max=redis.lookup_s_max, write=write, piece_bytes_max=JOB_BYTES_MAX)


def open_directory(settings: Settings, world: World, owner: str) -> NodeDirectory | None:
    """Return the directory in which nodes tell each other what they have; None where they share no Redis. Does not
    connect yet."""
    redis = settings.tiers.redis
    if not redis.url:
        return None
    from kvstore.tiers.redis.commands import Commands
    from kvstore.tiers.redis.topology import topology_of

    servers = Commands(topology_of(redis, RedisAddress.of(redis.url), redis.control_count))
    return NodeDirectory(servers, settings.server.node, redis.prefix, owner, world.clock, world.random)


def needs_of_redis(settings: Settings) -> list[Need]:
    """Return the open files that the tier's connections need."""
    redis = settings.tiers.redis
    if not redis.is_on:
        return []
    return [Need(2 * redis.control_count + 4, "tiers.redis.control_count", redis.control_count, "one each: lower it")]
