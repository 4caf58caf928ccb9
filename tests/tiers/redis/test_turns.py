"""A write or read that waits for its turn gives up a server that failed, and goes on waiting for other nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.chunk import StoredSlabs
from kvstore.errors import Unavailable
from kvstore.seams import SystemClock
from kvstore.tiers.pace import Waits
from kvstore.tiers.redis.access import Access, Server
from kvstore.tiers.redis.moves import PartRead
from kvstore.tiers.redis.reads import AHEAD, ChunkReads, Reads
from tests.tiers.redis.tiers import redis_tier

DEAD, OTHER = (Server(Access(), host, 6379) for host in ("dead", "other"))
PART = PartRead((), StoredSlabs(0))
MAKING: Any = None


class Movers:
    """Take jobs, which end when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Server, Future[Any]]] = []

    def submit(self, _function: Callable[..., Any], server: Server, *_: object) -> Future[Any]:
        self.jobs.append((server, Future()))
        return self.jobs[-1][1]


async def test_a_dead_node_fails_only_the_reads_that_wait_for_it() -> None:
    movers: Any = Movers()
    clock = SystemClock()
    reads = Reads(movers, 1, clock, Waits(clock))
    servers = [DEAD] * AHEAD + [OTHER, DEAD]
    asked = [asyncio.ensure_future(reads.read(ChunkReads(each, b"key"), PART)) for each in servers]
    await asyncio.sleep(0)
    assert [server for server, _ in movers.jobs] == [DEAD] * AHEAD, "all turns are taken"
    movers.jobs[0][1].set_exception(Unavailable("connection refused"))
    await asyncio.wait([asked[0]])
    for _, job in movers.jobs[1:]:
        job.set_result([True])
    found = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(each, Unavailable) for each in found] == [True] + [False] * AHEAD + [True]


async def test_a_dead_node_fails_only_the_writes_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def server_of(key: bytes) -> Server:
        return DEAD if key == b"dead" else OTHER

    def written(server: Server, *_: object) -> str:
        if server is DEAD:
            raise Unavailable("connection refused")
        return server.host

    async with redis_tier("redis://127.0.0.1:1") as tier:
        monkeypatch.setattr(tier._control, "server_of", server_of)
        tier._turns = asyncio.Semaphore(1)
        monkeypatch.setattr("kvstore.tiers.redis.tier.write_copy", written)
        writes = (tier._move_once(1, key, MAKING, []) for key in (b"dead", b"other", b"dead"))
        first, other, last = await asyncio.gather(*writes, return_exceptions=True)
        assert other.result == "other"  # type: ignore[union-attr]  # an error fails the test, too
        assert "connection refused" in str(first)
        assert "failed others meanwhile" in str(last)


async def test_a_write_goes_to_the_server_that_is_the_primary_at_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    primary = [DEAD]

    async def server_of(_key: bytes) -> Server:
        return primary[0]

    async with redis_tier("redis://127.0.0.1:1") as tier:
        monkeypatch.setattr(tier._control, "server_of", server_of)
        tier._turns = asyncio.Semaphore(0)
        monkeypatch.setattr("kvstore.tiers.redis.tier.write_copy", lambda server, *_: server.host)
        write = asyncio.ensure_future(tier._move_once(1, b"key", MAKING, []))
        await asyncio.sleep(0)
        primary[0] = OTHER  # it changed places with its replica, which takes no writes
        tier._turns.release()
        assert str((await write).result) == "other"
