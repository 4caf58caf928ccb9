"""Removes the doctor's own chunk from a shared tier, by the settings of this command."""

from __future__ import annotations

import asyncio
import errno
import socket
from contextlib import suppress
from pathlib import Path

from kvstore.config import RedisAddress, Settings
from kvstore.errors import KVStoreError
from kvstore.tiers.s3.writing import remove_objects

ANSWER_S_MAX = 5.0


def removed_from(settings: Settings, name: str, storage_key: bytes) -> str:
    """Remove the chunk's copy from the tier. Return why it could not; empty when it is gone."""
    try:
        if name == "s3" and settings.tiers.s3.bucket:
            remove_objects(settings.tiers.s3, [storage_key])
            return ""
        if name == "redis" and (addresses := _addresses(settings)):
            asyncio.run(_removed_from_redis(settings, addresses, storage_key))
            return ""
    except Exception as error:  # noqa: BLE001 - the boundary: whatever an engine or its client does is told
        return error.message if isinstance(error, KVStoreError) else str(error) or type(error).__name__
    return f"these settings do not name the tier {name}"


def _addresses(settings: Settings) -> list[RedisAddress]:
    """Return the server that the settings name, or those that the sidecar runs: one of them at most has the chunk."""
    redis = settings.tiers.redis
    if not redis.embedded:
        return [RedisAddress.of(redis.url)] if redis.url else []
    found = sorted((settings.server.state_directory / "redis").glob("*/redis.sock"))
    return [RedisAddress(kind="server", path=str(each)) for each in found if _is_served(each)]


def _is_served(path: Path) -> bool:
    """Return False for a socket that a killed server left behind: what it had went with it."""
    with socket.socket(socket.AF_UNIX) as line, suppress(OSError):
        line.settimeout(ANSWER_S_MAX)
        return line.connect_ex(str(path)) != errno.ECONNREFUSED
    return True


async def _removed_from_redis(settings: Settings, addresses: list[RedisAddress], storage_key: bytes) -> None:
    from kvstore.tiers.redis.names import ChunkKeys
    from kvstore.tiers.redis.topology import topology_of

    redis = settings.tiers.redis
    for address in addresses:
        topology = topology_of(redis, address, 1)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await topology.client.delete(ChunkKeys(redis.prefix).chunk(storage_key))
        finally:
            await topology.close()
