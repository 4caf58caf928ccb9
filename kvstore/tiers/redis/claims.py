"""Claims on chunks of a tier that has no place for them, kept in the Redis that nodes share."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from kvstore.config import RedisAddress, RedisSettings
from kvstore.seams import Clock, SystemRandom
from kvstore.tiers.contract import UploadState
from kvstore.tiers.pace import Waits
from kvstore.tiers.redis.control import Control
from kvstore.tiers.redis.names import ChunkKeys
from kvstore.tiers.redis.topology import topology_of

CONNECTION_COUNT = 2
ANSWER_S_MAX = 0.25
AGAIN_S = 5.0
"""Seconds for which a Redis that did not answer is asked for no claim."""
WHO_BYTES = 16
TIER = "s3"
_random = SystemRandom()
_log = logging.getLogger("kvstore.redis")


class RedisClaims:
    """Implements ``UploadClaims`` for chunks of the S3 tier."""

    def __init__(self, settings: RedisSettings, clock: Clock) -> None:
        address = RedisAddress.of(settings.url)
        topology = topology_of(settings, address, CONNECTION_COUNT)
        self._control = Control(topology, CONNECTION_COUNT, Waits(clock))
        self._keys = ChunkKeys(settings.prefix)
        self._clock = clock
        self._who = _random.bytes(WHO_BYTES).hex().encode()
        self._again_at_s = float("-inf")

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float) -> Sequence[bool]:
        """See ``UploadClaims``."""
        if self._clock.monotonic() < self._again_at_s:
            return [True] * len(storage_keys)
        claims = [self._keys.claim(key, TIER) for key in storage_keys]
        try:
            states = await self._control.claim(claims, (), self._who, int(claim_s * 1000), ANSWER_S_MAX)
        except Exception as error:  # noqa: BLE001 - the boundary: what this Redis says fails no upload to the bucket
            _log.info("uploads are not claimed for now", extra={"tier": TIER, "reason": str(error)})
            self._again_at_s = self._clock.monotonic() + AGAIN_S
            return [True] * len(storage_keys)
        return [state is UploadState.FREE for state in states]

    async def release(self, storage_keys: Sequence[bytes]) -> None:
        """See ``UploadClaims``."""
        if storage_keys and self._clock.monotonic() >= self._again_at_s:
            with suppress(Exception):  # a claim that stays expires by itself
                claims = [self._keys.claim(key, TIER) for key in storage_keys]
                await self._control.release(claims, ANSWER_S_MAX)

    async def close(self) -> None:
        await self._control.close()
