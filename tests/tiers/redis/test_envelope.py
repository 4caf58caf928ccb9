"""Copies in envelopes in a Redis server that somebody else writes to, too."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore.errors import DataLoss, Exhausted
from kvstore.spec import ENVELOPES
from kvstore.tiers.redis.names import HEADER_FIELD, field_name, fields_of
from tests.contracts.chunks import LARGE, SMALL, Chunk, chunk, layouts
from tests.fakes.redis_server import KEYS, RedisServer
from tests.tiers.attacks import KEY, OLD, WRITE_ID, attacked, outcome_of, trust
from tests.tiers.redis.tiers import got, put, redis_tier


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as found:
        yield found


def whole(client: Any, what: Chunk) -> np.ndarray:
    """A copy's header and body."""
    fields = client.hgetall(KEYS.chunk(what.header.storage_key))
    names = [HEADER_FIELD, *(field_name(what.header.write_id, n) for n in range(len(fields_of(what.layout))))]
    return np.frombuffer(bytearray(b"".join(fields[name] for name in names)), np.uint8)


def replace_with(client: Any, what: Chunk, copy: np.ndarray) -> None:
    key, at = KEYS.chunk(what.header.storage_key), copy.size - what.layout.body_bytes
    names = [field_name(copy[WRITE_ID].tobytes(), n) for n in range(len(fields_of(what.layout)))]
    parts = (copy[at + span.start : at + span.stop].tobytes() for span in fields_of(what.layout))
    client.delete(key)
    client.hset(key, mapping={HEADER_FIELD: copy[:at].tobytes(), **dict(zip(names, parts, strict=True))})


@pytest.mark.parametrize("kind", ENVELOPES)
async def test_an_attacker_gets_a_wrong_byte_in_only_without_an_envelope(server: RedisServer, kind: str) -> None:
    client: Any = server.client()
    client.flushall()
    async with redis_tier(server.url, trust=trust(kind)) as tier:

        async def get(what: Chunk) -> np.ndarray:
            return whole(client, await put(tier, what))

        async def set_to(what: Chunk, copy: np.ndarray) -> None:
            replace_with(client, what, copy)

        outcomes = await attacked(get, set_to, lambda what, memory: tier.open(what.name, memory))
    assert (outcomes["wrong"] > 0) == (kind == "none"), outcomes


@pytest.mark.parametrize("kind", ENVELOPES)
async def test_chunks_of_any_shape_come_back(server: RedisServer, kind: str) -> None:
    server.client().flushall()
    async with redis_tier(server.url, trust=trust(kind)) as tier:
        for number, layout in enumerate((*layouts().values(), LARGE)):
            what = await put(tier, chunk(number, layout))
            assert await got(tier, what)
            assert await got(tier, what, what.any_write)
            stored = await tier.open(what.name)
            assert stored is not None
            for slab in range(len(layout.slabs)):
                await stored.check(range(slab, slab + 1))
                target = np.zeros(layout.slabs[slab].byte_count, np.uint8)
                await stored.read(range(slab, slab + 1), [target])
                assert (target == what.pieces[1 + slab]).all()


async def test_keys_change_and_no_chunk_is_lost(server: RedisServer) -> None:
    server.client().flushall()
    async with redis_tier(server.url, trust=trust("aead", OLD)) as before:
        await put(before, chunk(1))
    ours = trust("mac", KEY, OLD)
    async with redis_tier(server.url, trust=ours) as tier:
        assert await got(tier, chunk(1))
        await put(tier, chunk(2))
        await put(tier, chunk(1, write=1))  # takes the place of the older one
        ours.ring.change((KEY,))
        assert await got(tier, chunk(1, write=1))
        assert await got(tier, chunk(2))


async def test_what_others_sealed_is_a_miss_that_stays(server: RedisServer) -> None:
    """Nor does an earlier release, to whom it is a newer one's, replace it."""
    client: Any = server.client()
    client.flushall()
    async with redis_tier(server.url, trust=trust("mac", OLD)) as theirs:
        await put(theirs, chunk(1))
        for other in (trust("mac", KEY), trust("none")):
            async with redis_tier(server.url, trust=other) as tier:
                assert await tier.open(chunk(1).name) is None
                before = tier.statistics().written_bytes
                with pytest.raises(Exhausted, match="another envelope key"):
                    await put(tier, chunk(1, write=1))
                assert tier.statistics().written_bytes == before
        assert await got(theirs, chunk(1))


async def test_without_its_package_what_others_encrypted_is_a_miss_that_stays(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without the key. The tier goes on: it has copies in other envelopes, too."""
    server.client().flushall()
    async with (
        redis_tier(server.url, trust=trust("aead")) as theirs,
        redis_tier(server.url, trust=trust("mac")) as ours,
    ):
        await put(theirs, chunk(1))
        with monkeypatch.context() as without:
            without.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
            assert await ours.open(chunk(1).name) is None
            await put(ours, chunk(2))
            assert await got(ours, chunk(2))
        assert await got(ours, chunk(1))


async def test_what_has_no_envelope_is_refused_where_one_is_demanded_and_replaced(server: RedisServer) -> None:
    server.client().flushall()
    async with redis_tier(server.url) as plain, redis_tier(server.url, trust=trust("mac")) as tier:
        await put(plain, chunk(1))
        with pytest.raises(DataLoss, match="without an envelope"):
            await tier.open(chunk(1).name)
        await put(tier, chunk(1))
        assert await got(tier, chunk(1))
    async with redis_tier(server.url, trust=trust("none", KEY)) as lenient:
        assert await outcome_of(chunk(1), lambda what, memory: lenient.open(what.name, memory)) == "right"


async def test_without_an_envelope_not_a_byte_is_another(server: RedisServer) -> None:
    client: Any = server.client()
    client.flushall()
    async with redis_tier(server.url) as tier:
        await put(tier, chunk(1))
    found = whole(client, chunk(1))
    assert (found == np.concatenate(chunk(1).pieces)).all()
    assert found[8:12].tolist() == [1, 0, 1, 0]
    assert found.size == SMALL.total_bytes
