"""Nodes that store the same at the same moment: each chunk is sent by one of them, and no node that dies keeps others
from sending it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.config import RedisSettings
from kvstore.errors import KVStoreError, PermissionDenied
from kvstore.movement import left, shared_target
from kvstore.seams import Clock, SystemClock, Workers, WorkerThreads
from kvstore.spec import Durability, MissReason
from kvstore.tiers import Buffer, ChunkName, StoredChunk, UploadState
from kvstore.tiers.redis.claims import RedisClaims
from kvstore.tiers.redis.names import HEADER_FIELD
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.s3 import Lanes, S3Tier
from tests.contracts.chunks import chunk
from tests.contracts.shared.s3_stand import LANES, S3Stand
from tests.fakes import Switch
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import KEYS, RedisServer
from tests.scenario import scenario
from tests.simulated import InlineWorkers
from tests.tiers.redis.tiers import put, redis_tier, until
from tests.tiers.shared.world import PATH, Node, Wide, run

NODE_COUNT = 12
PROMPT = tuple(range(1, 41))
"""Chunks of one prompt: more than one question is asked of."""
LONG_S = 600.0
"""A claim that outlives every test."""


@pytest.fixture
def wide(tmp_path: Path) -> Wide:
    return Wide(tmp_path)


@pytest.fixture(scope="module")
def running() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.client().flushall()
    return running


@pytest.fixture(autouse=True)
def claims_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is; and the engine's answer is waited for."""
    monkeypatch.setattr(shared_target, "ASK_S_MAX", LONG_S)
    monkeypatch.setattr(shared_target, "CLAIM_S", LONG_S)
    monkeypatch.setattr(shared_target, "CLAIM_S_MAX", LONG_S)
    monkeypatch.setattr(left, "LEFT_S_MAX", LONG_S)


def counted(nodes: Sequence[Node], what: str, tier: str = "redis") -> int:
    return sum(node.counters()[f"{tier}_{what}_chunks"] for node in nodes)


# ------------------------------------------------------------ a real Redis


class TimedNode(Node):
    """By the machine's clock, as what it shares with others has no other."""

    def time(self) -> Clock:
        return SystemClock()

    def movers(self, seed: int) -> Workers:
        return InlineWorkers()


@asynccontextmanager
async def herd(server: RedisServer, count: int) -> AsyncIterator[list[TimedNode]]:
    """So many nodes over one server."""

    def tier() -> RedisTier:
        workers = (WorkerThreads(1, f"redis-{name}") for name in ("read", "write"))
        return RedisTier(
            RedisSettings(url=server.url), readers=next(workers), writers=next(workers), clock=SystemClock()
        )

    nodes = [TimedNode(tier, arena_chunks=64) for _ in range(count)]
    try:
        for node in nodes:
            await node.start()
        yield nodes
    finally:
        for node in nodes:
            await node.stop(kill=True)
            for each in node.shared:
                await each.close()


async def test_a_herd_that_stores_one_prompt_at_once_sends_each_chunk_once(server: RedisServer) -> None:
    async with herd(server, NODE_COUNT) as nodes:
        await asyncio.gather(*(node.give(*PROMPT) for node in nodes))
        assert counted(nodes, "written") == len(PROMPT)
        assert counted(nodes, "present") == (NODE_COUNT - 1) * len(PROMPT)
        assert counted(nodes, "left") > 0
        keys = server.client().keys()
        assert sorted(keys) == sorted(KEYS.chunk(node.key(*PROMPT[: n + 1])) for node in nodes[:1] for n in range(40))
        assert Counter(server.client().hexists(key, HEADER_FIELD) for key in keys) == {True: len(PROMPT)}


async def test_a_herd_that_asks_for_shared_has_it_proven_by_each_node(server: RedisServer) -> None:
    async with herd(server, NODE_COUNT) as nodes:
        await asyncio.gather(*(node.store(node.session, *PATH, durability=Durability.SHARED) for node in nodes))
        found = await asyncio.gather(
            *(node.controller.settle(node.query(*PATH), 60.0, Durability.SHARED) for node in nodes)
        )
        assert all(Durability.SHARED not in each.missing for each in found)
        assert counted(nodes, "written") == len(PATH)
        movements = [node.controller.parts.movement for node in nodes]
        targets = [movement.shared[0].target for movement in movements]
        for node, target in zip(nodes, targets, strict=True):
            assert all(target.is_proven(node.row(*PATH[: n + 1])) for n in range(len(PATH)))


async def test_what_goes_while_it_is_read_is_a_miss_and_no_damage(server: RedisServer) -> None:
    async with herd(server, 2) as (one, other):
        await one.give(7)
        opened = other.shared[0].open

        async def lost(name: ChunkName, ahead: Sequence[Buffer]) -> StoredChunk | None:
            stored: StoredChunk | None = await opened(name, ahead)
            server.client().flushall()
            return stored

        other.shared[0].open = lost
        assert await other.fetch(7) == (0, MissReason.EVICTED)


async def test_what_a_node_that_died_had_claimed_others_send_once_the_claim_has_ended(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_target, "CLAIM_S", 1.5)
    async with herd(server, 3) as (doomed, *others):
        begun: list[bytes] = []

        async def hang(header: ChunkHeader, layout: ChunkLayout, pieces: Any) -> None:
            begun.append(header.storage_key)
            await asyncio.sleep(LONG_S)

        doomed.shared[0].write = hang
        await doomed.keep(*PATH)
        await until(lambda: len(begun) == len(PATH))
        await doomed.stop(kill=True)
        monkeypatch.setattr(shared_target, "CLAIM_S", LONG_S)
        await asyncio.gather(*(node.give(*PATH) for node in others))
        assert counted(others, "written") == len(PATH)
        assert counted(others, "present") == len(PATH)


async def test_a_server_that_takes_no_claims_takes_chunks_as_before(server: RedisServer) -> None:
    """It may be full, or a user's rights too few; and somebody may have put anything in a claim's place."""
    client = server.client()
    rights = ["hget", "hset", "hlen", "hstrlen", "exists", "pexpire", "rename", "unlink", "eval", "evalsha", "ping"]
    client.execute_command(
        "ACL", "SETUSER", "few", "reset", "on", ">pw", "~*", *(f"+{each}" for each in rights), "+info"
    )
    settings = RedisSettings(url=f"unix://few:pw@{server.path}")
    tier = RedisTier(settings, readers=WorkerThreads(1, "read"), writers=WorkerThreads(1, "write"), clock=SystemClock())
    what = chunk(1)
    try:
        keys = [what.header.storage_key]
        for _ in range(2):
            assert await tier.claim(keys, LONG_S, 5.0) == [UploadState.FREE]
        await tier.write(what.header, what.layout, what.pieces)
        assert await tier.claim(keys, LONG_S, 5.0) == [UploadState.THERE]
    finally:
        await tier.close()


async def test_a_claim_that_cannot_be_read_is_nobodys(server: RedisServer) -> None:
    """A user may set it and not get it; and what lies in its place may be no string."""
    rights = ["set", "exists", "pexpire", "unlink", "eval", "evalsha", "ping", "info"]
    server.client().execute_command(
        "ACL", "SETUSER", "noget", "reset", "on", ">pw", "~*", *(f"+{each}" for each in rights)
    )
    keys = [chunk(number).header.storage_key for number in (1, 2)]
    server.client().lpush(KEYS.claim(keys[1], "s3"), 1)
    for user in ("noget:pw@", ""):
        claims = RedisClaims(RedisSettings(url=f"unix://{user}{server.path}"), SystemClock())
        try:
            for _ in range(2):
                assert await claims.claim(keys[not user :], LONG_S) == [True] * (1 + bool(user))
        finally:
            await claims.close()


async def test_a_claim_ends_with_a_write_that_failed(server: RedisServer) -> None:
    client, broken = server.client(), chunk(1)
    broken.pieces[1][0] ^= 1
    async with redis_tier(server.url, encoding="lz4") as tier:
        assert await tier.claim([broken.header.storage_key], LONG_S, 5.0) == [UploadState.FREE]
        with pytest.raises(KVStoreError):
            await put(tier, broken)
        await until(lambda: not client.exists(KEYS.claim(broken.header.storage_key, "redis")))


# ------------------------------------------------------------ S3 beside a Redis


async def test_uploads_to_s3_are_claimed_in_redis_while_it_answers(server: RedisServer, tmp_path: Path) -> None:
    stand = S3Stand(tmp_path)
    line = Proxy(server.path)

    def tier() -> S3Tier:
        host, port = line.address
        claims = RedisClaims(RedisSettings(url=f"redis://{host}:{port}"), SystemClock())
        lanes = Lanes(*(WorkerThreads(count, f"s3-{name}") for name, count in LANES))
        return S3Tier(stand.settings, lanes, SystemClock(), claims=claims)

    one, other = tier(), tier()
    keys = [chunk(number).header.storage_key for number in (1, 2)]
    try:
        await one.write(chunk(1).header, chunk(1).layout, chunk(1).pieces)
        assert await one.claim(keys, LONG_S, 5.0) == [UploadState.THERE, UploadState.FREE]
        assert await one.claim(keys[1:], LONG_S, 5.0) == [UploadState.FREE], "its own"
        assert await other.claim(keys, LONG_S, 5.0) == [UploadState.THERE, UploadState.TAKEN]
        line.cut()
        assert await other.claim(keys, LONG_S, 5.0) == [UploadState.THERE, UploadState.FREE]
    finally:
        for each in (one, other):
            await each.close()
        stand.switches.close()
        line.close()


async def test_what_another_node_uploads_is_not_looked_for_in_s3(server: RedisServer, tmp_path: Path) -> None:
    """A look is billed, and counts toward the day's."""
    stand = S3Stand(tmp_path)

    def tier() -> S3Tier:
        lanes = Lanes(*(WorkerThreads(count, f"s3-{name}") for name, count in LANES))
        claims = RedisClaims(RedisSettings(url=server.url), SystemClock())
        return S3Tier(stand.settings, lanes, SystemClock(), claims=claims)

    one, other = tier(), tier()
    what, later = chunk(1), chunk(2)
    keys = [each.header.storage_key for each in (what, later)]
    try:
        assert await one.claim(keys, LONG_S, 5.0) == [UploadState.FREE] * 2
        asked_count = len(stand.switches.asked)
        for _ in range(10):
            assert await other.claim(keys, LONG_S, 5.0) == [UploadState.TAKEN] * 2
        assert len(stand.switches.asked) == asked_count
        await one.write(what.header, what.layout, what.pieces)
        for node in (other, one):  # what is there nobody claims
            assert (await node.claim(keys[:1], LONG_S, 5.0)) == [UploadState.THERE]
        stand.switches.denied = frozenset({"PUT"})
        with pytest.raises(PermissionDenied):
            await one.write(later.header, later.layout, later.pieces)
        assert await other.claim(keys[1:], LONG_S, 5.0) == [UploadState.FREE], "whose write failed claims no more"
    finally:
        for each in (one, other):
            await each.close()
        stand.switches.close()


# ------------------------------------------------------------ how long others are waited for


@scenario(lambda wide: wide.node(s3="never"))
async def test_who_waits_for_a_level_is_not_kept_by_a_claim_that_nobody_ends(node: Node, wide: Wide) -> None:
    wide.engine.claims.update({node.key(*PATH[: n + 1]): (object(), LONG_S) for n in range(len(PATH))})
    await node.store(node.session, *PATH, durability=Durability.SHARED)
    found = await node.controller.settle(node.query(*PATH), 4.0, Durability.SHARED)
    assert Durability.SHARED not in found.missing
    assert counted([node], "left") == len(PATH)


def test_a_claim_that_never_ends_delays_a_chunk_and_no_other(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody may write anything there."""
    monkeypatch.setattr(left, "LEFT_S_MAX", 20.0)
    node = wide.node(s3="never", arena_chunks=64)

    async def scenario() -> None:
        for n in range(len(PATH)):
            wide.engine.claims[node.key(*PATH[: n + 1])] = (object(), LONG_S)
        await node.keep(*PATH)
        await node.keep(*range(11, 43))
        await asyncio.sleep(2.0)
        assert all(wide.in_redis(node, *range(11, 43)))
        assert not any(wide.in_redis(node, *PATH))
        await asyncio.sleep(25.0)
        assert all(wide.in_redis(node, *PATH))

    run([node], scenario)


@pytest.mark.parametrize("level", [Durability.SHARED, Durability.MEMORY])
@scenario(lambda wide: wide.node(s3="never", arena_chunks=64))
async def test_what_is_left_is_looked_for_less_and_less_often(node: Node, wide: Wide, level: Durability) -> None:
    """Over S3 each look is billed."""
    wide.engine.claims.update({node.key(*PROMPT[: n + 1]): (object(), 10.0) for n in range(len(PROMPT))})
    await node.store(node.session, *PROMPT, durability=level)
    await node.quiet()
    assert all(wide.in_redis(node, *PROMPT))
    assert asyncio.get_running_loop().time() < 10.0 + 2 * left.LATER_S
    assert node.counters()["redis_asked_chunks"] <= 11 * len(PROMPT)


@scenario(lambda wide: wide.node(s3="never"))
async def test_what_is_asked_for_while_it_is_left_is_looked_for_at_once(node: Node, wide: Wide) -> None:
    key, loop = node.key(7), asyncio.get_running_loop()
    wide.engine.claims[key] = (object(), LONG_S)
    await node.keep(7)
    await asyncio.sleep(3.2)  # the next look is at 5.1
    del wide.engine.claims[key]
    began_s = loop.time()
    found = await node.controller.settle(node.query(7), 60.0, Durability.SHARED)
    assert Durability.SHARED not in found.missing
    assert loop.time() - began_s < 1.0


def test_a_claim_lasts_for_all_that_is_claimed_with_it(wide: Wide, monkeypatch: pytest.MonkeyPatch) -> None:
    node = wide.node(s3="never", arena_chunks=64)
    monkeypatch.setattr(shared_target, "CLAIM_S", 0.0)
    monkeypatch.setattr(shared_target, "CLAIM_BYTES_PER_S", node.layout.total_bytes)

    async def scenario() -> None:
        asked: list[tuple[int, float]] = []
        claim = node.shared[0].claim

        async def heard(keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
            asked.append((len(keys), claim_s))
            return list(await claim(keys, claim_s, timeout_s))

        node.shared[0].claim = heard
        await node.give(*PROMPT)
        assert max(count for count, _ in asked) == shared_target.ASK_COUNT_MAX
        assert all(claim_s == count for count, claim_s in asked)

    run([node], scenario)


@scenario(lambda wide: wide.node(s3="never"))
async def test_a_tier_that_does_not_say_what_is_claimed_is_written_to(
    node: Node, wide: Wide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_target, "ASK_S_MAX", 2.0)

    async def late(*_: object) -> list[UploadState]:
        await asyncio.sleep(LONG_S)
        return []

    node.shared[0].claim = late
    await node.give(*PATH)
    assert all(wide.in_redis(node, *PATH))
    assert node.counters()["redis_late_answers"] > 0


@scenario(lambda wide: wide.node(s3="never"))
async def test_a_chunk_that_is_left_to_another_node_may_go_meanwhile(node: Node, wide: Wide) -> None:
    wide.engine.claims[node.key(7)] = (object(), 5.0)
    await node.keep(7)
    await asyncio.sleep(0.5)
    wide.redis.turn_on(Switch.AWAY)
    node.forget_memory()
    wide.redis.turn_off()
    await asyncio.sleep(30.0)
    assert all(wide.in_redis(node, 7)), "it was read back"
