"""What real Redis servers do to a tier: they drop, fill up, and hold what others put there."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import numpy as np
import pytest
import xxhash

from kvstore.chunk import ChunkLayout
from kvstore.errors import DataLoss, Exhausted, Unavailable
from kvstore.tiers.redis.names import FIELD_BYTES_MAX, HEADER_FIELD, fields_of, reads_of
from kvstore.tiers.redis.tier import RedisTier
from tests.contracts.chunks import LARGE, Chunk, chunk, layouts
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer, body_fields
from tests.tiers.redis.tiers import LARGE_SLABS, MANY_FIELDS, MIB, got, key_of, put, redis_tier, until

# ---------------------------------------------------------------- how it lies there


def test_a_body_is_cut_at_slabs_where_they_fit() -> None:
    assert [stop - start for start, stop in fields_of(MANY_FIELDS)] == [4 * MIB, 4 * MIB, 2 * MIB]
    assert [stop - start for start, stop in fields_of(LARGE_SLABS)] == [4 * MIB, MIB, 4 * MIB, MIB]
    for each in (*layouts().values(), LARGE, MANY_FIELDS, LARGE_SLABS):
        spans = fields_of(each)
        assert [spans[0].start, *(span.stop for span in spans)] == [*(span.start for span in spans), each.body_bytes]
        assert max(stop - start for start, stop in spans) <= FIELD_BYTES_MAX


def test_a_part_of_the_body_is_read_from_the_fields_that_have_it() -> None:
    rng = np.random.default_rng(1)
    for each in (MANY_FIELDS, LARGE_SLABS):
        for _ in range(50):
            start, stop = sorted(rng.integers(0, each.body_bytes + 1, 2).tolist())
            if start == stop:
                continue
            reads = reads_of(each, bytes(16), start, stop)
            assert sum(read.take for read in reads) == stop - start
            assert all(read.skip >= 0 and read.skip + read.take <= read.byte_count for read in reads)
            first = int(reads[0].name.rpartition(b".")[2])
            assert fields_of(each)[first].start + reads[0].skip == start


@pytest.mark.parametrize("which", [MANY_FIELDS, LARGE_SLABS], ids=["many fields", "large slabs"])
async def test_every_run_of_slabs_comes_back(server: RedisServer, which: ChunkLayout) -> None:
    """Also runs that begin or end within a field, into memory that lies apart."""
    async with redis_tier(server.url) as tier:
        what = await put(tier, chunk(1, which))
        client = server.client()
        assert client.hget(key_of(what), HEADER_FIELD) == what.pieces[0].tobytes()
        names = body_fields(client, what.header.storage_key)
        body = b"".join(client.hget(key_of(what), name) for name in names)
        assert body == b"".join(piece.tobytes() for piece in what.pieces[1:])
        assert {name.partition(b".")[0] for name in names} == {what.header.write_id[:8].hex().encode()}
        stored = await tier.open(what.name)
        assert stored is not None
        count = len(which.slabs)
        for first, stop in {(0, count), (0, 1), (count - 1, count), (1, count), (count // 2, count // 2 + 1)}:
            target = [np.empty(which.slabs[slab].byte_count, np.uint8) for slab in range(first, stop)]
            await stored.read(range(first, stop), target)
            for one, other in zip(target, what.pieces[1 + first : 1 + stop], strict=True):
                assert (one == other).all()
            await stored.check(range(first, stop))


async def test_chunks_stay_for_their_time_and_longer_when_they_are_used(server: RedisServer) -> None:
    client = server.client()
    async with redis_tier(server.url, ttl_s=3600.0) as tier:
        what = await put(tier, chunk(1))
        assert 3500 < client.ttl(key_of(what)) <= 3600
        client.expire(key_of(what), 60)
        assert await got(tier, what)
        await until(lambda: client.ttl(key_of(what)) > 3500)
    client.expire(key_of(what), 60)
    async with redis_tier(server.url, write="never") as tier:
        assert await got(tier, what)
        assert await tier.probe([what.header.storage_key], 1.0) == [True]
        await asyncio.sleep(1.2)
        assert client.ttl(key_of(what)) <= 60, "a node that only reads changes nothing"


async def test_a_write_leaves_one_key(server: RedisServer) -> None:
    async with redis_tier(server.url) as tier:
        what = await put(tier, chunk(1, MANY_FIELDS))
        assert server.client().keys() == [key_of(what)]
        for _ in range(3):
            await put(tier, chunk(1, MANY_FIELDS, write=2))
        assert server.client().keys() == [key_of(what)]


async def test_two_nodes_write_the_same_chunk_at_once(server: RedisServer) -> None:
    """Both have it by the same write, as after a fetch; and by different ones."""
    for writes in ([0] * 8, list(range(8))):
        chunks = [chunk(1, MANY_FIELDS, write=write) for write in writes]
        async with redis_tier(server.url) as one, redis_tier(server.url) as two:
            writing = [put(tier, each) for each, tier in zip(chunks, [one, two] * 4, strict=True)]
            for outcome in await asyncio.gather(*writing, return_exceptions=True):
                assert isinstance(outcome, Chunk), outcome
            found = await one.open(chunks[0].any_write)
            assert found is not None
            await found.check(range(10))
        assert len(server.client().keys("kvstore:v1:c:*")) == 1


# ---------------------------------------------------------------- what engines drop


async def test_what_was_dropped_before_its_commit_is_not_published(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, a part of it, or its header: a bare rename would publish half a chunk."""
    client = server.client()
    async with redis_tier(server.url) as tier:
        commit = tier._control.commit
        for number, spoil in enumerate(
            [
                lambda key: client.delete(key),
                lambda key: client.hdel(key, *[name for name in client.hkeys(key) if name.endswith(b".1")]),
                lambda key: client.hdel(key, HEADER_FIELD),
                lambda key: client.hset(key, HEADER_FIELD, b"another"),
            ]
        ):
            what = chunk(number, MANY_FIELDS)

            async def spoiled(unfinished: bytes, *args: Any, spoil: Any = spoil) -> str:
                spoil(unfinished)
                return await commit(unfinished, *args)

            monkeypatch.setattr(tier._control, "commit", spoiled)
            await tier.claim([what.header.storage_key], 600.0, 5.0)
            with pytest.raises(Exhausted, match="maxmemory"):
                await put(tier, what)
            assert client.keys() == []
            assert await tier.open(what.name) is None


async def test_a_full_engine_refuses_and_keeps_what_it_has(server: RedisServer) -> None:
    client = server.client()
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 24 * MIB)
    async with redis_tier(server.url) as tier:
        there, said = [], []
        for number in range(6):
            try:
                there.append(await put(tier, chunk(number, MANY_FIELDS)))
            except Exhausted as error:
                said.append(error.message)
        assert there
        assert said
        assert all("maxmemory" in each for each in said)
        for each in there:
            assert await got(tier, each)
        await until(lambda: not client.keys("kvstore:v1:t:*"))
        assert tier.stalled_s() == 0.0


async def test_an_engine_that_drops_costs_misses(server: RedisServer) -> None:
    client = server.client()
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 40 * MIB)
    async with redis_tier(server.url) as tier:
        there = []
        for number in range(8):
            try:
                there.append(await put(tier, chunk(number, MANY_FIELDS)))
            except Exhausted:
                continue  # among so few keys it may choose the one that is being written
        found = [await came(tier, each) for each in there]
        assert any(found)
        assert sum(found) < 5


async def came(tier: RedisTier, what: Chunk) -> bool:
    """Return True when the tier gives the chunk. What a reader has yet to take counts, too, so a read may have a chunk
    dropped: that very one, too, which is a miss as well."""
    try:
        return await got(tier, what)
    except DataLoss as error:
        if error.fields["reason"] != "gone":
            raise
        return False


async def test_a_cancelled_write_leaves_nothing_for_long(server: RedisServer) -> None:
    async with redis_tier(server.url) as tier:
        writing = asyncio.ensure_future(put(tier, chunk(1, LARGE_SLABS)))
        await asyncio.sleep(0.002)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        assert writing.cancelled()
        await until(lambda: not server.client().keys("kvstore:v1:t:*"))
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            proxy.bytes_per_s = 40e6
            writing = asyncio.ensure_future(put(tier, chunk(2, LARGE_SLABS)))
            await until(lambda: server.client().keys("kvstore:v1:t:*"))
            proxy.cut()
            with pytest.raises(Unavailable):
                await writing
            left = server.client().keys("kvstore:v1:t:*")
            assert all(0 < server.client().ttl(key) <= 300 for key in left), "it goes by itself"


# ---------------------------------------------------------------- what others put there


async def test_another_type_is_lost_data_until_it_is_stored_again(server: RedisServer) -> None:
    what, client = chunk(1), server.client()
    async with redis_tier(server.url) as tier:
        for spoil in (
            lambda: client.set(key_of(what), b"x"),
            lambda: client.rpush(key_of(what), b"x"),
            lambda: client.sadd(key_of(what), b"x"),
            lambda: client.hset(key_of(what), "other", b"x"),
        ):
            client.delete(key_of(what))
            spoil()
            assert await tier.probe([what.header.storage_key], 1.0) == [True]
            with pytest.raises(DataLoss):
                await tier.open(what.name)
            await put(tier, what)
            assert await got(tier, what)


async def test_what_becomes_another_type_while_it_is_open_is_lost(server: RedisServer) -> None:
    async with redis_tier(server.url) as tier:
        what = await put(tier, chunk(1))
        stored = await tier.open(what.name)
        assert stored is not None
        server.client().set(key_of(what), b"x")
        with pytest.raises(DataLoss, match="something else"):
            await stored.check(range(2))


async def test_what_a_newer_release_wrote_is_a_miss_and_stays(server: RedisServer) -> None:
    what, client = chunk(1), server.client()
    async with redis_tier(server.url) as tier:
        await put(tier, what)
        for at, form, value in ((10, "<H", 2), (24, "<Q", 1 << 40)):
            header = bytearray(what.pieces[0].tobytes())
            struct.pack_into(form, header, at, value)
            header[368:384] = bytes(16)
            header[368:384] = xxhash.xxh3_128_digest(header)
            client.hset(key_of(what), HEADER_FIELD, bytes(header))
            before = client.hgetall(key_of(what))
            assert await tier.open(what.name) is None
            with pytest.raises(Exhausted, match="newer release"):
                await put(tier, chunk(1, write=2))
            assert client.hgetall(key_of(what)) == before
            assert client.keys() == [key_of(what)]


async def test_a_header_of_any_length_costs_no_memory(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    what, client = chunk(1), server.client()
    async with redis_tier(server.url) as tier:
        await put(tier, what)
        asked = []
        opened = tier._control.open

        async def noted(*args: Any) -> Any:
            asked.append(await opened(*args))
            return asked[-1]

        monkeypatch.setattr(tier._control, "open", noted)
        for size in (0, 1, 5000, 40 * MIB):
            client.hset(key_of(what), HEADER_FIELD, what.pieces[0].tobytes()[:size].ljust(size, b"\0"))
            with pytest.raises(DataLoss):
                await tier.open(what.name)
        assert max(len(each.header) for each in asked) <= what.layout.header_bytes


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB + 1, 30 * MIB])
async def test_a_field_of_another_length_is_lost_and_disturbs_no_other_read(server: RedisServer, size: int) -> None:
    client = server.client()
    async with redis_tier(server.url) as tier:
        what, other = await put(tier, chunk(1, MANY_FIELDS)), await put(tier, chunk(2, MANY_FIELDS))
        name = body_fields(client, what.header.storage_key)[-1]
        client.hset(key_of(what), name, bytes(size))
        for _ in range(2):
            with pytest.raises(DataLoss, match="another length"):
                await got(tier, what)
            assert await got(tier, other)
