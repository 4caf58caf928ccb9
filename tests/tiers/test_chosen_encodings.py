"""Encodings that shared tiers choose: per model, by what was measured, and every chunk comes back to the byte."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.chunk import layout_of
from kvstore.errors import KVStoreError
from kvstore.spec import CacheKind, LayerSpec
from kvstore.tiers.choice import FIRST_COUNT
from tests.contracts.chunks import Chunk, chunk
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.specs import small_spec
from tests.tiers.redis.tiers import got, redis_tier

LAYER = LayerSpec(kv_heads=4, k_dim=128, v_dim=128)
LAYOUTS = {
    is_noise: layout_of(small_spec(model_id=f"{is_noise}", layers=(LAYER,) * 2, chunk_tokens=64), CacheKind.KV, 64)
    for is_noise in (False, True)
}
"""Two models, by whether their chunks are noise, which no encoding makes smaller."""
SLOW_BYTES_PER_S = 2e6
BUCKET_BYTES_PER_S = 8e6
"""Slow enough that a write takes longer than a question, whatever else the machine does."""
COUNT = FIRST_COUNT + 3


def of_model(number: int, *, is_noise: bool) -> Chunk:
    return chunk(number + 100 * is_noise, LAYOUTS[is_noise], is_noise=is_noise, fingerprint=bytes([is_noise]) * 32)


@asynccontextmanager
async def tier_at(name: str, home: Path) -> AsyncIterator[Any]:
    """A tier that chooses, behind a slow line: Redis, or a bucket where each byte is dear."""
    if name == "redis":
        with RedisServer() as server, Proxy(server.path) as line:
            line.bytes_per_s = SLOW_BYTES_PER_S
            async with redis_tier(f"redis://127.0.0.1:{line.address[1]}", encoding="auto") as tier:
                yield tier
        return
    stand = S3Stand(home)
    port = int(stand.switches.url.rpartition(":")[2])
    with Proxy(("127.0.0.1", port)) as line:
        line.bytes_per_s = BUCKET_BYTES_PER_S
        at = f"http://127.0.0.1:{line.address[1]}"
        dear = replace(stand.settings, endpoint_url=at, encoding="auto", range_bytes=4 << 20, paid_bytes_per_s=1)
        tier = tier_of(dear)
        try:
            yield tier
        finally:
            await tier.close()
            stand.switches.close()


@pytest.mark.parametrize(
    "name", [pytest.param("redis", marks=pytest.mark.redis), pytest.param("s3", marks=pytest.mark.s3)]
)
async def test_lz4_for_the_model_that_it_makes_smaller_and_raw_for_noise(name: str, tmp_path: Path) -> None:
    encodings: dict[bool, list[str]] = {False: [], True: []}
    async with tier_at(name, tmp_path) as tier:
        chunks = [(is_noise, of_model(number, is_noise=is_noise)) for number in range(COUNT) for is_noise in LAYOUTS]
        for _, what in chunks:
            await tier.write(what.header, what.layout, what.pieces)
        for is_noise, what in chunks * 2:  # the second time with the guess of the first
            assert await got(tier, what)
            encodings[is_noise].append((await tier.open(what.name)).header.encoding)
        told = {each.fingerprint[0]: each for each in tier.statistics().encodings}
    assert encodings[False] == (["raw"] * FIRST_COUNT + ["lz4"] * (COUNT - FIRST_COUNT)) * 2
    assert encodings[True] == ["raw"] * 2 * COUNT
    assert (told[0].encoding, told[1].encoding) == ("lz4", "raw")
    assert told[0].ratio < 0.8 < 0.99 < told[1].ratio
    assert all(each.encode_bytes_per_s > 0 and each.decode_bytes_per_s > 0 for each in told.values())
    assert all(each.line_bytes_per_s > 0 for each in told.values())


@pytest.mark.s3
async def test_a_chunk_that_went_bad_in_memory_is_not_written_when_it_is_measured(tmp_path: Path) -> None:
    what = of_model(0, is_noise=False)
    what.pieces[1][1000] ^= 1
    async with tier_at("s3", tmp_path) as tier:
        with pytest.raises(KVStoreError, match="not the ones its header names"):
            await tier.write(what.header, what.layout, what.pieces)
        assert await tier.open(what.name) is None
