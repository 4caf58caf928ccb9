"""Commands that are packed at once are the commands that redis-py sends, on its connections."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from kvstore.tiers.redis.names import ChunkKeys
from kvstore.tiers.redis.packed import run_packed
from tests.fakes.redis_server import RedisServer

WORDS = (b"", b"a b", b"\r\n$3\r\n", b"\x00\xff" * 300, "ä", 12, -1)


def client_of(server: RedisServer) -> Redis:
    return Redis.from_url(server.url, protocol=2, retry=Retry(NoBackoff(), 1))


async def test_a_server_reads_every_word_as_it_was(server: RedisServer) -> None:
    client = client_of(server)
    assert await run_packed(client, ("RPUSH", b"words of all kinds", *WORDS)) == len(WORDS)
    as_bytes = [each if isinstance(each, bytes) else str(each).encode() for each in WORDS]
    assert await client.lrange("words of all kinds", 0, -1) == as_bytes
    with pytest.raises(NoScriptError):
        await run_packed(client, ("EVALSHA", "0" * 40, 0))
    await client.aclose()


async def test_a_connection_that_the_server_closed_is_made_anew(server: RedisServer) -> None:
    client = client_of(server)
    assert await run_packed(client, ("PING",)) == b"PONG"
    [connection] = client.connection_pool._available_connections
    real = connection.send_packed_command

    async def cut_first(command: object, **how: object) -> None:
        connection.send_packed_command = real
        server.client().client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.05)
        await real(command, **how)

    connection.send_packed_command = cut_first
    assert await run_packed(client, ("PING",)) == b"PONG"
    await client.aclose()


async def test_a_reply_that_nobody_waits_for_any_more_is_nobody_elses(server: RedisServer) -> None:
    client = client_of(server)
    with suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await run_packed(client, ("BLPOP", b"nothing comes", 0.2))
    await asyncio.sleep(0.3)
    assert await run_packed(client, ("ECHO", b"mine")) == b"mine"
    await client.aclose()


def test_keys_name_the_prefix_and_the_chunk_whatever_the_prefix_has() -> None:
    for prefix in ("kvstore", "100%d:%b%%"):
        assert ChunkKeys(prefix).chunks([b"\0\xff", b"ab"]) == [
            f"{prefix}:v1:c:{{{each}}}".encode() for each in ("00ff", "6162")
        ]
