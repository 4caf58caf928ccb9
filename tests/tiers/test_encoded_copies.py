"""Encoded copies in shared tiers, in envelopes or not: smaller, right to the byte, and every node reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import Making, layout_of, making, parse_header
from kvstore.errors import DataLoss, KVStoreError
from kvstore.spec import ENVELOPES, CacheKind, Encoding, LayerSpec
from kvstore.tiers import SharedTier
from kvstore.tiers.redis.names import FIELD_BYTES_MAX, HEADER_FIELD, fields_of
from tests.contracts.chunks import LARGE, Chunk, chunk, layouts
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.fakes.redis_server import KEYS, RedisServer
from tests.specs import small_spec
from tests.tiers.attacks import trust
from tests.tiers.redis.tiers import got, redis_tier

WIDE = LayerSpec(kv_heads=4, k_dim=256, v_dim=256)
CUT = layout_of(small_spec(layers=(WIDE,) * 4, chunk_tokens=500), CacheKind.KV, 500)
"""Slabs of 2 MB that encode to about half: as many of them in a field as fit."""
SHAPES = (*layouts().values(), LARGE, CUT)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


class Place:
    """An engine, for tiers of any encoding and envelope."""

    def __init__(self, name: str, server: RedisServer, home: Path) -> None:
        self._server = server
        self._stand = S3Stand(home) if name == "s3" else None
        server.client().flushall()

    @asynccontextmanager
    async def tier(self, encoding: str, kind: str = "none") -> AsyncIterator[Any]:
        if self._stand is None:
            async with redis_tier(self._server.url, trust=trust(kind), encoding=encoding) as tier:
                yield tier
            return
        found = tier_of(replace(self._stand.settings, encoding=encoding, range_bytes=4 << 20), trust(kind))
        try:
            yield found
        finally:
            await found.close()

    def close(self) -> None:
        if self._stand is not None:
            self._stand.switches.close()


@pytest.fixture(params=["redis", "s3"])
def place(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[Place]:
    found = Place(request.param, server, tmp_path)
    yield found
    found.close()


async def put(tier: SharedTier, what: Chunk) -> None:
    await tier.write(what.header, what.layout, what.pieces)


@pytest.mark.parametrize("kind", ENVELOPES)
@pytest.mark.parametrize("saves_min", [making.SAVES_MIN, -1.0], ids=["where it pays", "always"])
async def test_chunks_of_any_shape_come_back_whole_and_in_parts(
    place: Place, kind: str, saves_min: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(making, "SAVES_MIN", saves_min)
    encodings = set()
    async with place.tier("lz4", kind) as tier:
        for number, layout in enumerate(SHAPES):
            what = chunk(number, layout)
            await put(tier, what)
            assert await got(tier, what)
            stored = await tier.open(what.name)
            encodings.add(stored.header.encoding)
            for slab in range(len(layout.slabs)):
                await stored.check(range(slab, slab + 1))
                target = np.full(layout.slabs[slab].byte_count, 0x5A, np.uint8)
                await stored.read(range(slab, slab + 1), [target])
                assert (target == what.pieces[1 + slab]).all()
        assert tier.statistics().written_bytes < 0.8 * sum(layout.total_bytes for layout in SHAPES)
    assert encodings == ({"lz4"} if saves_min < 0 else {"raw", "lz4"})


@pytest.mark.parametrize("kind", ENVELOPES)
async def test_nodes_read_what_others_wrote_however_that_is_encoded(place: Place, kind: str) -> None:
    async with place.tier("raw", kind) as raw, place.tier("lz4", kind) as encoded:
        ours, theirs = chunk(1, CUT), chunk(2, CUT)
        await put(encoded, ours)
        await put(raw, theirs)
        for node in (raw, encoded):
            assert await got(node, ours)
            assert await got(node, theirs)
        assert encoded.statistics().written_bytes < 0.8 * raw.statistics().written_bytes
        await put(raw, ours)  # it is there, or takes the place of what is
        assert await got(encoded, ours)


async def test_an_open_chunk_whose_place_another_encoding_takes_is_gone_and_not_damaged(server: RedisServer) -> None:
    server.client().flushall()
    what = chunk(1, CUT)
    async with redis_tier(server.url) as raw, redis_tier(server.url, encoding="lz4") as encoded:
        for one, other in ((raw, encoded), (encoded, raw)):
            await put(one, what)
            stored = await raw.open(what.name)
            assert stored is not None
            await put(other, what)
            with pytest.raises(DataLoss) as found:
                await stored.check(range(len(CUT.slabs)))
            assert found.value.fields["reason"] == "gone"
            assert await got(raw, what)


async def test_what_went_bad_in_memory_is_not_written(place: Place) -> None:
    what = chunk(1, CUT)
    what.pieces[3][1000] ^= 1
    async with place.tier("lz4") as tier:
        with pytest.raises(KVStoreError, match="not the ones its header names"):
            await put(tier, what)
        assert await tier.open(what.name) is None


async def test_fields_end_where_encoded_slabs_do(server: RedisServer) -> None:
    client: Any = server.client()
    client.flushall()
    what = chunk(1, CUT)
    async with redis_tier(server.url, encoding="lz4") as tier:
        await put(tier, what)
    found = client.hgetall(KEYS.chunk(what.header.storage_key))
    header = parse_header(found.pop(HEADER_FIELD), CUT)
    assert header.stored is not None
    spans = fields_of(CUT, header.stored)
    assert sorted(map(len, found.values())) == sorted(span.stop - span.start for span in spans)
    assert {span.stop for span in spans} <= set(header.stored.slab_offsets.tolist())
    assert len(spans) < len(fields_of(CUT))
    assert max(map(len, found.values())) <= FIELD_BYTES_MAX


def made(what: Chunk, encoding: Encoding) -> bytes:
    way = Making(header=what.header, layout=what.layout, encoding=encoding, sealing=None)
    return b"".join(piece.tobytes() for piece in way.made(what.pieces)[1])


def test_what_encoding_saves_too_little_of_stays_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    what = chunk(1, LARGE)
    assert len(made(what, Encoding.LZ4)) < 0.8 * LARGE.total_bytes
    monkeypatch.setattr(making, "SAVES_MIN", 0.9)
    assert made(what, Encoding.LZ4) == made(what, Encoding.RAW)
