"""The directory, in a real Redis: who is believed, and for how long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvstore.config import RedisAddress, RedisSettings
from kvstore.directory import LIVE_S, NodeDirectory
from kvstore.directory.directory import PIPELINE_COUNT, PIPELINES_AT_ONCE
from kvstore.errors import Unavailable
from kvstore.seams import SystemRandom
from kvstore.spec import Tier
from kvstore.tiers.redis.commands import Commands
from kvstore.tiers.redis.topology import topology_of
from tests.fakes.redis_server import RedisServer

KEYS = [bytes([number]) * 32 for number in range(4)]
TIMEOUT_S = 5.0


class HandClock:
    """Stands still until it is moved."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


def servers(url: str) -> Commands:
    """The way to them that a node has."""
    settings = RedisSettings(url=url)
    return Commands(topology_of(settings, RedisAddress.of(url), settings.control_count))


@asynccontextmanager
async def node(
    server: RedisServer, name: str, owner: str = "", clock: HandClock | None = None
) -> AsyncIterator[NodeDirectory]:
    directory = NodeDirectory(servers(server.url), name, "kvstore", owner, clock or HandClock(), SystemRandom())  # type: ignore[arg-type]  # it only tells the time
    try:
        yield directory
    finally:
        await directory.close()


async def test_what_one_node_tells_the_other_finds(server: RedisServer) -> None:
    async with node(server, "a") as a, node(server, "b") as b:
        assert not await a.beat()
        assert await a.beat()
        await b.beat()
        await a.tell({KEYS[0]: Tier.DRAM, KEYS[1]: Tier.NVME})
        await b.tell({KEYS[0]: Tier.NVME})
        assert (await b.where(KEYS[:3], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}, {"a": Tier.NVME}, {}]
        assert (await a.where(KEYS[:3], TIMEOUT_S)).chunks == [{"b": Tier.NVME}, {}, {}]
        await a.tell({KEYS[0]: Tier.NVME, KEYS[1]: Tier.NONE})
        assert (await b.where(KEYS[:2], TIMEOUT_S)).chunks == [{"a": Tier.NVME}, {}]


async def test_who_was_not_heard_lately_counts_no_more(server: RedisServer) -> None:
    clock = HandClock()
    async with node(server, "a") as a, node(server, "b", clock=clock) as b:
        await a.beat()
        await b.beat()
        await a.tell({KEYS[0]: Tier.DRAM})
        clock.now_s += LIVE_S - 1
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]
        clock.now_s += 2
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{}]


@pytest.mark.parametrize("how", ["closed", "renewed", "started again"])
async def test_what_an_earlier_incarnation_told_counts_no_more(server: RedisServer, how: str) -> None:
    async with node(server, "b") as b, node(server, "a") as a:
        await b.beat()
        await a.beat()
        await a.tell({KEYS[0]: Tier.DRAM})
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]
        if how == "closed":
            await a.close()
        elif how == "renewed":
            a.renew()
            await a.beat()
        else:
            async with node(server, "a") as again:
                await again.beat()
                await again.tell({KEYS[0]: Tier.NVME, KEYS[1]: Tier.DRAM})
                assert (await b.where(KEYS[:2], TIMEOUT_S)).chunks == [{"a": Tier.NVME}, {"a": Tier.DRAM}]
                return
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{}]


async def test_tenants_do_not_meet(server: RedisServer) -> None:
    async with node(server, "a", "one") as a, node(server, "b", "other") as b:
        await a.beat()
        await b.beat()
        await a.tell({KEYS[0]: Tier.DRAM})
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{}]


async def test_two_nodes_of_one_name_are_told_so(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with node(server, "a") as former:
        await former.beat()
    async with node(server, "a") as one:
        await one.beat()
        assert "server.node" not in caplog.text, "that was this node, before it started again"
        async with node(server, "a") as other:
            await other.beat()
            await one.beat()
            await other.beat()
            said = [each.message for each in caplog.records if each.levelno == logging.ERROR]
            assert len(said) == 2
            assert all("server.node" in each for each in said)


async def test_a_redis_that_lost_all_says_so_at_the_next_beat(server: RedisServer) -> None:
    async with node(server, "a") as a:
        await a.beat()
        with server.client() as client:
            client.flushall()
        assert not await a.beat()


async def test_a_redis_that_comes_back_as_it_was_before_says_so_at_the_next_beat(server: RedisServer) -> None:
    """It died, and loads its last snapshot: the node is in it, and what the node told since is not."""
    async with node(server, "a") as a:
        await a.beat()
        server.client().save()
        assert await a.beat()
        await a.tell({KEYS[0]: Tier.DRAM})
        server.kill()
        server.start()
        assert not await a.beat()
        assert await a.beat()


async def test_a_beat_whose_answer_was_lost_has_nothing_told_anew(server: RedisServer) -> None:
    async with node(server, "a") as a:
        await a.beat()
        server.client().zincrby(a._nodes, 0.5, a._member)  # Redis took a beat, and its answer never came
        assert await a.beat()


async def test_what_others_wrote_there_is_no_entry(server: RedisServer) -> None:
    async with node(server, "b") as b, node(server, "a") as a:
        await b.beat()
        await a.beat()
        await a.tell({KEYS[0]: Tier.DRAM, KEYS[1]: Tier.DRAM})
        with server.client() as client:
            names = [f"kvstore:v1:d:{{{key.hex()}}}" for key in KEYS]
            incarnation = client.hget(names[0], "a").split()[0]
            strange = (
                b"",
                b"\xff\xfe",
                b"word word",
                incarnation,
                incarnation + b" -1",
                incarnation + b" 99",
                incarnation + b" 0",
            )
            for value in strange:
                client.hset(names[0], "a", value)
                assert (await b.where(KEYS[:2], TIMEOUT_S)).chunks == [{}, {"a": Tier.DRAM}], value
            client.set(names[2], "no hash")
        assert (await b.where(KEYS[:3], TIMEOUT_S)).chunks == [{}, {"a": Tier.DRAM}, {}]


async def test_a_redis_that_is_away_is_unavailable_and_found_again(server: RedisServer) -> None:
    async with node(server, "a") as a, node(server, "b") as b:
        with pytest.raises(Unavailable):
            await a.where(KEYS[:1], TIMEOUT_S)  # nobody heard of it yet: no time is lost
        await a.beat()
        await b.beat()
        server.kill()
        for call in (a.beat(), a.tell({KEYS[0]: Tier.DRAM}), a.where(KEYS, TIMEOUT_S)):
            with pytest.raises(Unavailable):
                await call
        assert not a.is_reachable
        server.start()
        assert not await a.beat()
        await a.tell({KEYS[0]: Tier.DRAM})
        await b.beat()
        assert (await b.where(KEYS[:1], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]


async def test_a_beat_that_is_under_way_revives_no_incarnation_that_has_ended(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A former incarnation would count on, and the node would take it for another node that has its name."""
    async with node(server, "a") as a:
        await a.beat()
        going, ask_each = asyncio.Event(), a._servers.ask_each

        async def held(commands: Sequence[Any]) -> list[Any]:
            if any(words[0] == "ZADD" for _, words in commands):
                await going.wait()
            return await ask_each(commands)

        a._servers.ask_each = held  # type: ignore[method-assign]  # its servers, when they are slow
        beating = asyncio.ensure_future(a.beat())
        await asyncio.sleep(0.05)
        a._servers.ask_each = ask_each  # type: ignore[method-assign]  # and quick again
        a.renew()
        renewed = asyncio.ensure_future(a.beat())
        await asyncio.sleep(0.05)
        going.set()
        await asyncio.gather(beating, renewed)
        [members] = await ask_each([(a._nodes, ("ZRANGE", a._nodes, 0, -1))])
        assert members == [a._member.encode()]
        assert await a.beat()
        assert "another node has this node's name" not in caplog.text


class OddServers:
    """They answer every command with the same, or raise it."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    async def ask_each(self, commands: Sequence[object]) -> list[object]:
        if isinstance(self._answer, Exception):
            raise self._answer
        return [self._answer] * len(commands)

    async def close(self) -> None:
        raise ValueError


@pytest.mark.parametrize("answer", [None, 5, b"OK", [1, 2], [], {}, {1: 2}, ValueError("no number")], ids=repr)
async def test_answers_that_no_redis_gives_are_an_outage_and_end_nothing(answer: object) -> None:
    """The service itself would end with them: its tasks expect the directory's own errors alone."""
    directory = NodeDirectory(OddServers(answer), "a", "kvstore", "", HandClock(), SystemRandom())  # type: ignore[arg-type]  # it only tells the time
    with pytest.raises(Unavailable, match=r"tiers\.redis\.url"):
        await directory.beat()
    assert not directory.is_reachable
    for call in (
        lambda: directory.tell({KEYS[0]: Tier.DRAM}), lambda: directory.keep({KEYS[0]: Tier.DRAM}),
        lambda: directory.where(KEYS, TIMEOUT_S), lambda: directory.give_hints(KEYS[0], 1.0, b"hints"),
    ):  # fmt: skip
        directory.is_reachable = True
        with suppress(Unavailable):
            await call()
    with suppress(Unavailable):
        assert await directory.hints(KEYS[0]) in (None, b"OK")
    directory.is_reachable = True
    await directory.close()


class HalfDead:
    """Servers on a way that breaks: of two questions at a time the first is refused at once, the second has no answer
    before the way ``is_mended``."""

    is_mended = False
    asked_count = hanging_count = 0

    async def ask_each(self, commands: Sequence[object]) -> list[object]:
        self.asked_count += 1
        if self.is_mended:
            return [1] * len(commands)
        if self.asked_count % 2:
            await asyncio.sleep(0)
            raise Unavailable("it hung up")
        self.hanging_count += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.hanging_count -= 1
        raise AssertionError("nobody answers")

    async def close(self) -> None: ...


async def test_a_question_that_hangs_beside_one_that_fails_keeps_no_turn() -> None:
    """There are few turns: the directory would answer nothing any more, however well its servers do."""
    servers = HalfDead()
    directory = NodeDirectory(servers, "a", "kvstore", "", HandClock(), SystemRandom())  # type: ignore[arg-type]  # it only tells the time
    changes = {number.to_bytes(32, "little"): Tier.NONE for number in range(2 * PIPELINE_COUNT)}
    for _ in range(PIPELINES_AT_ONCE):
        with pytest.raises(Unavailable, match="it hung up"):
            await directory.tell(changes)
        assert not servers.hanging_count
    servers.is_mended = True
    async with asyncio.timeout(1.0):
        assert await directory.tell(changes) == []
