"""Routers that ask the directory: what one of them does hurts no other, and other releases' entries hurt none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.asyncio

from kvstore.directory import NodeDirectory
from kvstore.directory.directory import PIPELINE_COUNT, PIPELINES_AT_ONCE, SLOW_S
from kvstore.errors import Unavailable
from kvstore.seams import SystemClock, SystemRandom
from kvstore.spec import Tier
from tests.directory.test_directory import servers
from tests.fakes.redis_server import RedisServer

KEY = bytes(32)
TIMEOUT_S = 5.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def node(server: RedisServer, name: str) -> NodeDirectory:
    return NodeDirectory(servers(server.url), name, "kvstore", "", SystemClock(), SystemRandom())


async def test_a_caller_without_patience_leaves_the_directory_to_the_others(server: RedisServer) -> None:
    a, b = node(server, "a"), node(server, "b")
    await a.beat()
    await b.beat()
    await a.tell({KEY: Tier.DRAM})
    with pytest.raises(Unavailable):
        await b.where([KEY], 0.0)
    assert (await b.where([KEY], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]
    server.stop()
    try:
        with pytest.raises(Unavailable, match="in time"):
            await b.where([KEY], SLOW_S)
        with pytest.raises(Unavailable, match="at present"):
            await b.where([KEY], TIMEOUT_S)
    finally:
        server.go_on()
    await a.close()
    await b.close()


async def test_a_newer_releases_tier_is_no_entry(server: RedisServer) -> None:
    a, b = node(server, "a"), node(server, "b")
    await a.beat()
    await b.beat()
    await a.tell({KEY: Tier.DRAM})
    client = redis.asyncio.Redis(unix_socket_path=server.path)
    [name] = await client.keys("*:d:*")
    incarnation = (await client.hget(name, "a")).split(b" ")[0]
    for tier in (b"99", b"9" * 5000, "²".encode(), b"-1", b""):
        await client.hset(name, "a", incarnation + b" " + tier)
        assert (await b.where([KEY], TIMEOUT_S)).chunks == [{}]
    await client.aclose()
    await a.close()
    await b.close()


async def test_many_keys_take_few_connections(server: RedisServer) -> None:
    a = node(server, "a")
    await a.beat()
    keys = [number.to_bytes(32, "big") for number in range(PIPELINE_COUNT * 20)]
    client = redis.asyncio.Redis(unix_socket_path=server.path)
    before = int((await client.info("stats"))["total_connections_received"])
    await a.where(keys, TIMEOUT_S)
    after = int((await client.info("stats"))["total_connections_received"])
    assert after - before < PIPELINES_AT_ONCE
    await client.aclose()
    await a.close()
