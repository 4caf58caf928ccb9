"""Routers that ask the directory: what one of them does hurts no other, and other releases' entries hurt none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis.asyncio

from kvstore.controller import locating
from kvstore.directory import NodeDirectory
from kvstore.directory.directory import PIPELINE_COUNT, PIPELINES_AT_ONCE, SLOW_S
from kvstore.errors import Unavailable
from kvstore.seams import Deadline, SystemClock, SystemRandom
from kvstore.spec import Tier
from tests.controller.service import Service
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


async def test_a_redis_that_stands_still_takes_no_router_what_the_node_itself_has(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is certain. It must come before the router gives up, and need not wait for hints about others."""
    monkeypatch.setattr(locating, "DIRECTORY_S", 0.2)
    clock = SystemClock()
    service, a = Service(clock=clock), node(server, "a")
    object.__setattr__(service.parts, "directory", a)  # parts are frozen
    await a.beat()
    await service.store(service.controller.open_session(), 1)
    server.stop()
    try:
        async with asyncio.timeout(8.0):
            found = await service.controller.locate([service.query(1)], Deadline.of(clock, 60.0, 60.0))
    finally:
        server.go_on()
    assert [(each.tier, each.chunk_count) for each in found.chains[0]] == [(Tier.DRAM, 1)]
    assert "in time" in found.reason
    await a.close()


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
