"""Builds the S3 tier."""

from __future__ import annotations

from kvstore.config import Settings
from kvstore.seams import WorkerThreads
from kvstore.seams.scheduler import MOVER_NICE
from kvstore.server.descriptors import Need
from kvstore.server.trust import trust_of
from kvstore.server.world import TierOwner, World
from kvstore.tiers import SharedUse, UploadClaims, WritePolicy
from kvstore.tiers.s3 import Lanes, S3Tier

ASKER_COUNT = 16
"""Lookups that wait for a bucket at once."""
CLAIM_FILES = 4
"""Connections to the Redis in which uploads are claimed."""


def build_s3(settings: Settings, world: World, owner: TierOwner) -> SharedUse | None:
    """Build the tier; see ``Builder``. It is built even if the bucket cannot be reached, because that may change."""
    s3 = settings.tiers.s3
    if not s3.bucket:
        return None
    trust = trust_of("s3", s3.envelope, owner)
    lanes = Lanes(
        readers=world.movers.lane("s3-read", s3.reader_count, nice=MOVER_NICE),
        writers=world.movers.lane("s3-write", s3.writer_count, nice=MOVER_NICE),
        askers=world.movers.lane("s3-ask", ASKER_COUNT, nice=MOVER_NICE),
        near=WorkerThreads(1, "s3-near", nice=MOVER_NICE),
    )
    account = settings.server.state_directory / "s3" / (owner.name or "default")
    tier = S3Tier(s3, lanes, world.clock, trust, _claims(settings, world), account)
    tier.prepare()
    return SharedUse(tier=tier, lookup_s_max=s3.lookup_s_max, write=WritePolicy(s3.write))


def _claims(settings: Settings, world: World) -> UploadClaims | None:
    """Return the claims of uploads in the Redis that nodes share; None where they share none."""
    if not settings.tiers.redis.url:
        return None
    from kvstore.tiers.redis.claims import RedisClaims  # redis-py costs memory and time: only where it is used

    return RedisClaims(settings.tiers.redis, "s3", world.clock)


def needs_of_s3(settings: Settings) -> list[Need]:
    """Return the open files that the tier's connections need."""
    s3 = settings.tiers.s3
    files = s3.reader_count + s3.writer_count + ASKER_COUNT + CLAIM_FILES
    return [Need(files, "tiers.s3.reader_count", s3.reader_count, "one each: lower it")] if s3.bucket else []
