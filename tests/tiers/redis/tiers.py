"""Redis tiers of a test's own, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvstore.chunk import ChunkLayout, Trust, layout_of
from kvstore.config import RedisSettings
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.spec import CacheKind, LayerSpec
from kvstore.tiers import ChunkName
from kvstore.tiers.redis.tier import RedisTier
from tests.contracts.chunks import Chunk
from tests.fakes.redis_server import KEYS
from tests.specs import small_spec

LAYER = LayerSpec(kv_heads=4, k_dim=64, v_dim=64)
MIB = 1 << 20


def layout(layer_count: int, token_count: int) -> ChunkLayout:
    """With slabs of 1 KiB for each token."""
    spec = small_spec(layers=(LAYER,) * layer_count, chunk_tokens=token_count)
    return layout_of(spec, CacheKind.KV, token_count)


MANY_FIELDS = layout(10, 1024)
"""Ten slabs of 1 MiB: three fields."""
LARGE_SLABS = layout(2, 5120)
"""Two slabs of 5 MiB: each is cut."""


def key_of(what: Chunk) -> bytes:
    """Where a chunk lies on a server."""
    return KEYS.chunk(what.header.storage_key)


@asynccontextmanager
async def redis_tier(url: str, trust: Trust | None = None, **settings: Any) -> AsyncIterator[RedisTier]:
    """Closed at the end."""
    tier = RedisTier(
        RedisSettings(url=url, **settings), readers=WorkerThreads(2, "redis-read"),
        writers=WorkerThreads(2, "redis-write"), clock=SystemClock(),
        trust=trust,
    )  # fmt: skip
    try:
        yield tier
    finally:
        await tier.close()


async def put(tier: RedisTier, what: Chunk) -> Chunk:
    """Write it. Returns it."""
    await tier.write(what.header, what.layout, what.pieces)
    return what


async def got(tier: RedisTier, what: Chunk, name: ChunkName | None = None) -> bool:
    """Return True when the tier gives exactly this chunk. False for a miss; other bytes fail the test."""
    target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in what.layout.slabs]
    stored = await tier.open(name or what.name, target)
    if stored is None:
        return False
    await stored.read(range(len(target)), target)
    assert all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    return True


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for what becomes true by itself."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - who makes it true may be another process
            await asyncio.sleep(0.01)
