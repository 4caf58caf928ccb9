"""Announcing, to a real Redis: entries of what is here stay, those of nodes that are gone go, and a failure is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from redis.crc import key_slot

from kvstore.controller.fetches.lookup import namespaces_of
from kvstore.directory import NodeDirectory, directory
from kvstore.errors import Unavailable
from kvstore.seams import SystemClock, SystemRandom
from kvstore.server import announcing
from kvstore.server.announcing import Announcer
from kvstore.spec import MissReason, Tier
from kvstore.tiers.redis.replies import RIGHTS
from tests.controller.service import Service
from tests.directory.test_directory import TIMEOUT_S, servers
from tests.fakes.redis_server import RedisServer
from tests.tiers.redis.test_topology import Cluster

SHORT_S = 1.2
"""The expiry of entries in these tests."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "ENTRY_S", SHORT_S)
    monkeypatch.setattr(directory, "FORGOTTEN_S", SHORT_S)
    for name, seconds in {"KEEP_S": SHORT_S / 4, "KEEP_S_MIN": SHORT_S / 4, "LOOK_S": 0.05, "BEAT_S": 0.1}.items():
        monkeypatch.setattr(announcing, name, seconds)


class Told:
    """A node whose chunks are announced."""

    def __init__(self, url: str, name: str, chunks: int = 64) -> None:
        clock = SystemClock()
        self.service = Service(chunks=chunks, clock=clock)
        self.directory = NodeDirectory(servers(url), name, "kvstore", "", clock, SystemRandom())
        self.announcer = Announcer(
            self.service.controller, self.directory, self.service.parts.movement.names.key, clock
        )
        self.session = self.service.controller.open_session()

    def key(self, *path: int) -> bytes:
        """Return the storage key of the path's last chunk, the same on all nodes."""
        [space] = namespaces_of(self.service.parts.catalog, self.service.query(*path), for_store=True)
        return self.service.parts.movement.names.key(space, self.service.query(*path).digests[-1])

    @asynccontextmanager
    async def announced(self) -> AsyncIterator[None]:
        """Ends as a node does that is killed: it withdraws nothing."""
        task = asyncio.create_task(self.announcer.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110 - it is another process that makes it so
            await asyncio.sleep(0.05)


async def test_entries_of_a_living_node_stay_and_those_of_a_dead_one_go(server: RedisServer) -> None:
    a, b, dead = (Told(server.url, name) for name in ("a", "b", "dead"))
    await a.service.store(a.session, 1)
    await a.service.store(a.session, 2)
    await dead.service.store(dead.session, 1)
    await dead.service.store(dead.session, 3)
    keys = [a.key(1), a.key(2), a.key(3)]
    client = server.client()
    names = [f"kvstore:v1:d:{{{key.hex()}}}" for key in keys]

    async def all_told() -> bool:
        return [set(client.hkeys(name)) for name in names] == [{b"a", b"dead"}, {b"a"}, {b"dead"}]

    async with a.announced():
        async with dead.announced():
            await until(all_told)
        for _ in range(int(3 * SHORT_S / 0.1)):
            a.service.check(a.session, 1)  # 1 is used, 2 lies there
            await asyncio.sleep(0.1)
        assert [set(client.hkeys(name)) for name in names] == [{b"a"}, {b"a"}, set()]
        assert all(0 < client.pttl(name) <= 1000 * SHORT_S for name in names[:2])
        await b.directory.beat()
        assert await b.directory.where(keys, TIMEOUT_S) == ([{"a": Tier.DRAM}, {"a": Tier.DRAM}, {}], "")
        await a.service.store(a.session, 3)
        await asyncio.sleep(2 * SHORT_S)
        assert (await b.directory.where(keys[2:], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}], (
            "stored after the first pass"
        )
    for each in (a, b, dead):
        await each.directory.close()


async def test_entries_that_a_full_redis_drops_are_told_again_soon(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It drops what was used least, and those are entries: chunks are used. The members' own key is used all the time,
    so nothing else shows it."""
    monkeypatch.setattr(announcing, "KEEP_S", 3600.0)
    monkeypatch.setattr(directory, "ENTRY_S", 3600.0)
    a = Told(server.url, "a")
    await a.service.store(a.session, 1)
    name, client = f"kvstore:v1:d:{{{a.key(1).hex()}}}", server.client()

    async def is_told() -> bool:
        return bool(client.hexists(name, "a"))

    async with a.announced():
        for _ in range(3):
            await until(is_told)
            client.delete(name)
        await until(is_told)
    await a.directory.close()


async def test_a_chunk_that_was_not_told_yet_is_none_that_redis_dropped(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a node that stores all the time keeps all that it has without a pause."""
    monkeypatch.setattr(announcing, "KEEP_S", 3600.0)
    a = Told(server.url, "a")
    await a.directory.beat()
    await a.announcer._begin()
    while a.announcer._told is not None:
        await a.announcer._tell_on()
    await a.service.store(a.session, 1)
    for _ in range(2):  # the only batch, and the pass's end
        a.announcer._keep_s = 0.0
        await a.announcer._keep()
    assert a.announcer._period_s == 2 * announcing.KEEP_S_MIN
    await a.directory.close()


async def test_what_changes_while_all_is_told_is_told_between(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fail-over every node tells all that it has, with pauses: lookups wait for the same server."""
    monkeypatch.setattr(announcing, "BATCH_COUNT_MAX", 1)
    monkeypatch.setattr(announcing, "LOOK_S", 0.3)
    a = Told(server.url, "a")
    for number in range(1, 4):
        await a.service.store(a.session, number)
    tell, told, at_s = a.directory.tell, list[bytes](), dict[bytes, float]()

    async def slow(changes: Any) -> Any:
        told.extend(changes)
        at_s.update(dict.fromkeys(changes, SystemClock().monotonic()))
        if len(told) == 2:  # nowhere, and the first one
            await a.service.store(a.session, 9)
        await asyncio.sleep(0.01)
        return await tell(changes)

    monkeypatch.setattr(a.directory, "tell", slow)

    async def are_told() -> bool:
        return len(set(told)) == 5

    async with a.announced():
        await until(are_told)
    assert told.index(a.key(9)) < len(told) - 1
    times = [at_s[a.key(number)] for number in range(1, 4)]
    assert all(after - one >= 0.01 * announcing.TELL_PAUSES for one, after in pairwise(times)), "no change ends a pause"
    await a.directory.close()


async def test_what_told_anew_meanwhile_is_not_removed_with_the_dead(server: RedisServer) -> None:
    """A node comes back between the look at a chunk's entries and their removal."""
    a, b = Told(server.url, "a"), Told(server.url, "b")
    key, name = a.key(1), f"kvstore:v1:d:{{{a.key(1).hex()}}}"
    client = server.client()
    await a.directory.beat()
    client.hset(name, "b", "0011223344556677 2")
    ask_each = a.directory._servers.ask_each

    async def ask(commands: Any) -> list[Any]:
        if commands[0][1][0] == "EVAL":
            await b.directory.beat()
            await b.directory.tell({key: Tier.DRAM})
        return await ask_each(commands)

    a.directory._servers.ask_each = ask  # type: ignore[method-assign]  # its servers, as if one of them were dead
    await a.directory.keep({key: Tier.NVME})
    assert (await a.directory.where([key], TIMEOUT_S)).chunks == [{"b": Tier.DRAM}]
    await a.directory.close()
    await b.directory.close()


async def test_what_leaves_after_a_question_that_failed_is_told_all_the_same(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request asked where a prefix is, and Redis did not answer that: the next beat finds all as it was."""
    monkeypatch.setattr(directory, "ENTRY_S", 3600)
    a, b = Told(server.url, "a"), Told(server.url, "b")
    await a.service.store(a.session, 1)

    async def is_told() -> bool:
        await b.directory.beat()
        return (await b.directory.where([a.key(1)], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]

    async def is_gone() -> bool:
        return not await is_told()

    async def fails(commands: Any) -> list[Any]:
        raise Unavailable("the connection was reset")

    async with a.announced():
        await until(is_told)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(a.directory._servers, "ask_each", fails)
            with pytest.raises(Unavailable):
                await a.directory.where([a.key(1)], TIMEOUT_S)
        a.service.parts.movement.removal.remove(0, MissReason.EVICTED)
        await until(is_gone, 2.0)
    for each in (a, b):
        await each.directory.close()


async def test_a_node_that_may_not_tell_says_so_once_and_is_announced_when_it_may(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    rights = [f"+{each.lower()}" for each in RIGHTS]
    client = server.client()
    client.execute_command("ACL", "SETUSER", "user", "reset", "on", ">pw", "~kvstore:*", *rights, "-zadd")
    a, b = Told(f"unix://user:pw@{server.path}", "a"), Told(server.url, "b")
    await a.service.store(a.session, 1)
    await b.service.store(b.session, 2)

    async def is_said() -> bool:
        return bool(a.directory.problem)

    async def is_announced() -> bool:
        return (await b.directory.where([a.key(1)], TIMEOUT_S)).chunks == [{"a": Tier.DRAM}]

    async with a.announced(), b.announced():
        await until(is_said)
        await asyncio.sleep(0.5)
        [said] = [each for each in caplog.records if "not announced" in each.message]
        for text in (a.directory.problem, said.reason):  # type: ignore[attr-defined]  # an extra of the log
            assert "tiers.redis.username" in text
            assert "the right ZADD" in text
        assert (await a.directory.where([a.key(2)], TIMEOUT_S)).chunks == [{"b": Tier.DRAM}]
        client.execute_command("ACL", "SETUSER", "user", "+zadd", "-hdel")
        await asyncio.sleep(0.5)
        assert "the right HDEL" in a.directory.problem, "also before anything leaves this node"
        client.execute_command("ACL", "SETUSER", "user", "+hdel")
        await until(is_announced)
        assert a.directory.problem == ""
        assert len([each for each in caplog.records if "not announced" in each.message]) == 1
    await a.directory.close()
    await b.directory.close()


@pytest.mark.parametrize("which", ["the members'", "another"])
async def test_a_node_of_a_cluster_that_dies_takes_its_entries_and_no_others(which: str) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        for each in cluster.servers:
            each.client().config_set("cluster-require-full-coverage", "no")
        a, b = Told(cluster.url, "a"), Told(cluster.url, "b")
        paths = [(number,) for number in range(1, 25)]
        for path in paths[:12]:
            await a.service.store(a.session, *path)
        keys = [a.key(*path) for path in paths]
        of_members = cluster.owner_of(b"kvstore:v1:nodes:default")
        dies = of_members if which == "the members'" else (of_members + 1) % 3
        slots = range(16384 * dies // 3, 16384 * (dies + 1) // 3)
        is_lost = [key_slot(key.hex().encode()) in slots for key in keys]
        assert any(is_lost[:12]) and not all(is_lost[:12]) and any(is_lost[12:]) and not all(is_lost[12:])  # noqa: PT018
        here = [{"a": Tier.DRAM}]

        async def is_known(count: int) -> bool:
            if not b.directory.is_reachable:
                return False
            found = await b.directory.where(keys, TIMEOUT_S)
            return (found.chunks, found.reason) == (here * count + [{}] * (len(keys) - count), "")

        async with a.announced(), b.announced():
            await until(lambda: is_known(12))
            cluster.servers[dies].kill()
            for path in paths[12:18]:
                await a.service.store(a.session, *path)
            told = [None if lost else each for each, lost in zip(here * 18 + [{}] * 6, is_lost, strict=True)]

            async def is_partly_known() -> bool:
                return (await b.directory.where(keys, TIMEOUT_S)).chunks == told

            await until(is_partly_known)
            found = await b.directory.where(keys, TIMEOUT_S)
            assert f"of {sum(is_lost)} of 24 chunks it is not known" in found.reason
            assert ("still live" in found.reason) is (which == "the members'")
            assert "tiers.redis" in found.reason
            cluster.servers[dies].start()
            await until(lambda: is_known(18))
        await a.directory.close()
        await b.directory.close()


async def test_who_lived_is_known_for_a_while_and_then_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        for each in cluster.servers:
            each.client().config_set("cluster-require-full-coverage", "no")
        a, b = Told(cluster.url, "a"), Told(cluster.url, "b")
        dies = cluster.owner_of(b"kvstore:v1:nodes:default")
        keys = [a.key(number) for number in range(12)]
        await a.directory.beat()
        await b.directory.beat()
        await a.directory.tell(dict.fromkeys(keys, Tier.DRAM))
        cluster.servers[dies].kill()
        assert {"a": Tier.DRAM} in (await b.directory.where(keys, TIMEOUT_S)).chunks
        monkeypatch.setattr(directory, "KEPT_S", 0.0)
        with pytest.raises(directory.Unavailable, match=r"tiers\.redis"):
            await b.directory.where(keys, TIMEOUT_S)
        await a.directory.close()
        await b.directory.close()
