"""Users of Redis: the rights that are named are enough for all that a node does, and who may only read still finds."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.errors import PermissionDenied, Unavailable
from kvstore.seams import SystemClock, SystemRandom
from kvstore.spec import Tier
from kvstore.tiers.redis.replies import CLUSTER_RIGHTS, DATABASE_RIGHTS, RIGHTS
from tests.conftest import ROOT
from tests.contracts.chunks import chunk
from tests.directory.test_directory import KEYS, TIMEOUT_S, NodeDirectory, servers
from tests.fakes.redis_server import RedisServer, other_binary
from tests.tiers.redis.tiers import got, key_of, put, redis_tier, until

MODEL = bytes(32)
READER = ("~*", "+@read", "+@scripting", "+ping", "+info", "-@write")
UNASKED = {"AUTH", "SELECT", "HELLO", "CLIENT"}
"""Commands of each new connection: redis-py names itself there, and needs no answer."""


@pytest.fixture(scope="module", params=["of all tests", "another"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    program = other_binary() if request.param == "another" else None
    if request.param == "another" and program is None:
        pytest.skip("no Redis 7 or Valkey on the PATH beside the one of all tests")
    with RedisServer(program=program) as running:
        yield running


def user(server: RedisServer, *rights: str) -> str:
    """The URL of a user with these rights and no others."""
    server.client().execute_command("ACL", "SETUSER", "user", "reset", "on", ">pw", *rights)
    return f"unix://user:pw@{server.path}"


def exactly(*names: str) -> tuple[str, ...]:
    return ("~kvstore:*", *(f"+{name.lower()}" for name in names))


def node(url: str, name: str) -> NodeDirectory:
    return NodeDirectory(servers(url), name, "kvstore", "", SystemClock(), SystemRandom())


async def all_that_a_node_does(server: RedisServer, url: str) -> None:
    """With chunks, claims, hints and the directory."""
    async with redis_tier(url) as tier, redis_tier(server.url) as other:
        what = await put(tier, chunk(1))
        key = what.header.storage_key
        assert await got(tier, what)
        assert await tier.probe([key], TIMEOUT_S) == [True]
        await tier.claim([bytes(32)], 60.0, TIMEOUT_S)
        server.client().pexpire(key_of(what), 60_000)
        await tier.touch([key])
        await until(lambda: server.client().ttl(key_of(what)) > 60)
        await until(lambda: tier.statistics().file_bytes)
        assert tier.statistics().state == "up"
        await tier.remove([key])
        assert not await got(other, what)
    a, b = node(url, "a"), node(server.url, "b")
    await b.beat()
    await b.tell({KEYS[0]: Tier.NVME})
    await a.beat()
    a.renew()
    assert not await a.beat()
    assert await a.tell({KEYS[0]: Tier.DRAM, KEYS[1]: Tier.DRAM}) == []
    assert await a.tell({KEYS[1]: Tier.NONE}) == []
    server.client().hset(f"kvstore:v1:d:{{{KEYS[0].hex()}}}", "dead", "0011223344556677 1")
    assert await a.keep({KEYS[0]: Tier.DRAM}) == []
    assert set(server.client().hkeys(f"kvstore:v1:d:{{{KEYS[0].hex()}}}")) == {b"a", b"b"}
    assert (await a.where(KEYS[:2], TIMEOUT_S)) == ([{"b": Tier.NVME}, {}], "")
    assert (await b.where(KEYS[:2], TIMEOUT_S)) == ([{"a": Tier.DRAM}, {}], "")
    await a.give_hints(MODEL, 1.0, b"hot")
    assert await a.hints(MODEL) == b"hot"
    await a.close()
    assert (await b.where(KEYS[:2], TIMEOUT_S)) == ([{}, {}], "")
    await b.close()


async def test_the_rights_that_are_named_are_enough_for_all_that_a_node_does(server: RedisServer) -> None:
    await all_that_a_node_does(server, user(server, *exactly(*RIGHTS)))


async def test_a_user_of_another_database_needs_one_right_more(server: RedisServer) -> None:
    url = user(server, *exactly(*RIGHTS, *DATABASE_RIGHTS)) + "?db=3"
    a = node(url, "a")
    await a.beat()
    assert server.client(db=3).exists("kvstore:v1:nodes:default")
    await a.close()


async def test_whatever_a_node_sends_is_among_the_rights_that_are_named(server: RedisServer) -> None:
    sent, has_begun = set[str](), threading.Event()

    def listen() -> None:
        with server.client().monitor() as monitor:
            has_begun.set()
            while (command := monitor.next_command()["command"].split()[0].upper()) != "ECHO":
                sent.add(command)

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    has_begun.wait(10.0)
    a = node(server.url, "sends")
    await a.beat()
    await a.tell({KEYS[2]: Tier.DRAM, KEYS[3]: Tier.NONE})
    server.client().hset(f"kvstore:v1:d:{{{KEYS[2].hex()}}}", "dead", "0011223344556677 1")
    await a.keep({KEYS[2]: Tier.DRAM})
    await a.where(KEYS, TIMEOUT_S)
    await a.give_hints(MODEL, 1.0, b"hot")
    await a.hints(MODEL)
    await a.close()
    async with redis_tier(server.url) as tier:
        what = await put(tier, chunk(2))
        await got(tier, what)
        await tier.claim([what.header.storage_key], 60.0, TIMEOUT_S)
        await tier.remove([what.header.storage_key])
    server.client().echo("the end")
    thread.join(10.0)
    assert {"ZADD", "TIME", "HGETALL", "EVAL", "RENAME"} <= sent, "it was seen"
    assert sent - set(RIGHTS) - UNASKED == set()


@pytest.mark.parametrize("lacks", ["ZADD", "TIME", "ZREM", "ZREMRANGEBYSCORE"])
async def test_who_lacks_a_right_is_told_which_and_finds_what_others_have(server: RedisServer, lacks: str) -> None:
    a, b = node(user(server, *exactly(*(each for each in RIGHTS if each != lacks))), "a"), node(server.url, "b")
    await b.beat()
    await b.tell({KEYS[0]: Tier.DRAM})
    with pytest.raises(PermissionDenied, match=f"the right {lacks}: give it") as refused:
        await a.beat()
    assert all(each in refused.value.message for each in ("tiers.redis.username", *RIGHTS, *CLUSTER_RIGHTS))
    assert (await a.where(KEYS[:1], TIMEOUT_S)).chunks == [{"b": Tier.DRAM}]
    await a.close()
    await b.close()


@pytest.mark.parametrize("lacks", ["HSET", "HDEL", "PEXPIRE"])
async def test_what_may_not_be_told_is_refused_with_its_right(server: RedisServer, lacks: str) -> None:
    a = node(user(server, *exactly(*(each for each in RIGHTS if each != lacks))), "a")
    await a.beat()
    with pytest.raises(PermissionDenied, match=f"the right {lacks}: give it"):
        await a.tell({KEYS[0]: Tier.DRAM, KEYS[1]: Tier.NONE})
    await a.close()


@pytest.mark.parametrize("lacks", ["ZRANGE", "HGETALL"])
async def test_who_may_not_read_it_knows_nothing_and_hears_why(server: RedisServer, lacks: str) -> None:
    a = node(user(server, *exactly(*(each for each in RIGHTS if each != lacks))), "a")
    try:
        await a.beat()
    except PermissionDenied:
        assert lacks == "ZRANGE"
    try:
        found = await a.where(KEYS[:1], TIMEOUT_S)
        assert found.chunks == [None]
        said = found.reason
    except Unavailable as error:
        said = error.message
    assert f"the right {lacks}" in said
    assert "tiers.redis.username" in said
    await a.close()


async def test_a_node_that_may_only_read_finds_who_lives_and_reads_hints(server: RedisServer) -> None:
    """It may not ask for Redis's time either."""
    a, b = node(user(server, *READER), "a"), node(server.url, "b")
    await b.beat()
    await b.tell({KEYS[0]: Tier.DRAM})
    await b.give_hints(MODEL, 1.0, b"hot")
    for _ in range(2):
        with pytest.raises(PermissionDenied, match=r"tiers\.redis\.username"):
            await a.beat()
        assert a.is_reachable
        assert await a.where(KEYS[:1], TIMEOUT_S) == ([{"b": Tier.DRAM}], "")
    assert await a.hints(MODEL) == b"hot"
    with pytest.raises(PermissionDenied):
        await a.give_hints(MODEL, 9.0, b"mine")
    server.client().zadd("kvstore:v1:nodes:default", {"gone 0011223344556677": time.time() - 60})
    server.client().hset(f"kvstore:v1:d:{{{KEYS[0].hex()}}}", "gone", "0011223344556677 1")
    assert await a.where(KEYS[:1], TIMEOUT_S) == ([{"b": Tier.DRAM}], "")
    await a.close()
    await b.close()


def test_the_manual_names_the_same_rights() -> None:
    text = (ROOT / "docs/cluster.md").read_text()
    [line] = [each for each in text.splitlines() if each.startswith("ACL SETUSER kvstore ")]
    named = {each[1:].upper() for each in line.split() if each.startswith("+")}
    assert named == set(RIGHTS)
    assert all(f"`{each}`" in text for each in (*CLUSTER_RIGHTS, *DATABASE_RIGHTS))
