"""A primary that changes: behind a name that is given to another server, and behind Sentinels. All
but one are real processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import RedisAddress, RedisSettings
from kvstore.directory import NodeDirectory
from kvstore.errors import PermissionDenied, Unavailable
from kvstore.seams import SystemClock, SystemRandom
from kvstore.tiers.redis import topology
from kvstore.tiers.redis.commands import Commands
from kvstore.tiers.redis.topology import Sentinels, topology_of
from tests.contracts.chunks import chunk
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.ports import free_port
from tests.tiers.redis.tiers import got, key_of, put, redis_tier, until

# ---------------------------------------------------------------- a name


async def test_a_name_that_leads_to_another_primary_is_followed() -> None:
    """As managed servers fail over: the old primary is a replica by then, and keeps its connections."""
    ports = [free_port() for _ in range(2)]
    addresses = [("127.0.0.1", each) for each in ports]
    with ExitStack() as stack:
        first, second = (stack.enter_context(RedisServer(port=each)) for each in ports)
        name = stack.enter_context(Proxy(addresses[0]))
        settings = RedisSettings(url="redis://{}:{}".format(*name.address))
        commands = Commands(topology_of(settings, RedisAddress.of(settings.url), 2))
        directory = NodeDirectory(commands, "a", settings.prefix, "", SystemClock(), SystemRandom())
        async with redis_tier(settings.url) as tier:
            await asyncio.gather(*(put(tier, chunk(1)) for _ in range(8)))  # by now each mover has a line
            await directory.beat()
            name.lead_to(addresses[1])
            first.client().execute_command("REPLICAOF", *addresses[1])
            await until(lambda: first.client().info("replication")["master_link_status"] == "up", 30.0)
            with pytest.raises(PermissionDenied, match="replica"):  # of questions, all of whose lines are made anew
                await put(tier, chunk(2))
            await asyncio.gather(*(put(tier, chunk(2)) for _ in range(8)))
            with suppress(PermissionDenied):
                await directory.beat()
            await directory.beat()
            assert second.client().exists(key_of(chunk(2)))
            assert tier.statistics().state == "up"
        await directory.close()


async def test_reads_leave_a_server_that_gives_nothing_any_more() -> None:
    """The old primary keeps its connections, and is without the data of the new one, as while it loads these."""
    ports = [free_port() for _ in range(2)]
    with ExitStack() as stack:
        first, second = (stack.enter_context(RedisServer(port=each)) for each in ports)
        name = stack.enter_context(Proxy(("127.0.0.1", ports[0])))
        async with redis_tier("redis://{}:{}".format(*name.address)) as tier, redis_tier(second.url) as other:
            what = await put(tier, chunk(1))
            await put(other, what)
            opened = await tier.open(what.name)
            assert opened is not None
            await asyncio.gather(*(opened.check(range(2)) for _ in range(8)))
            name.lead_to(("127.0.0.1", ports[1]))
            first.client().config_set("replica-serve-stale-data", "no")
            first.client().execute_command("REPLICAOF", "127.0.0.1", free_port())
            for call in (lambda: opened.check(range(2)), lambda: got(tier, what)):
                for _ in range(3):  # a kept line each of movers, and those of questions, meet the old one once
                    with suppress(Unavailable):
                        await call()
                await call()


# ---------------------------------------------------------------- Sentinel


async def test_sentinels_name_the_primary_also_after_it_changed() -> None:
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        first = stack.enter_context(RedisServer(port=ports[0]))
        second = stack.enter_context(RedisServer("--replicaof", "127.0.0.1", str(ports[0]), port=ports[1]))
        sentinel = stack.enter_context(RedisServer(port=ports[2], is_sentinel=True))
        asked = sentinel.client()
        asked.execute_command("SENTINEL", "MONITOR", "main", "127.0.0.1", ports[0], 1)
        asked.execute_command("SENTINEL", "SET", "main", "down-after-milliseconds", 500)
        url = f"redis+sentinel://127.0.0.1:{ports[2]}/main"
        async with redis_tier(url) as tier:
            what = await put(tier, chunk(1))
            assert await got(tier, what)
            assert first.client().exists(key_of(what))
            await until(lambda: second.client().exists(key_of(what)))
            await until(lambda: asked.sentinel_master("main")["num-slaves"] == 1, 20.0)
            first.kill()
            with pytest.raises(Unavailable):
                await put(tier, chunk(2))
            await until(lambda: second.client().info("replication")["role"] == "master", 30.0)
            async with asyncio.timeout(20):
                while True:
                    try:
                        await put(tier, chunk(2))
                        break
                    except Unavailable:
                        await asyncio.sleep(0.1)
            assert await got(tier, what)
            assert await got(tier, chunk(2))
            assert second.client().exists(key_of(chunk(2)))
        async with redis_tier(f"redis+sentinel://127.0.0.1:{ports[2]}/other") as tier:
            with pytest.raises(Unavailable, match=r"tiers\.redis"):
                await put(tier, chunk(1))


@contextmanager
def watched() -> Iterator[tuple[list[RedisServer], str]]:
    """A server that two Sentinels watch. Yields the Sentinels, and the URL that names them."""
    ports = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        stack.enter_context(RedisServer(port=ports[0]))
        sentinels = [stack.enter_context(RedisServer(port=each, is_sentinel=True)) for each in ports[1:]]
        for each in sentinels:
            each.client().execute_command("SENTINEL", "MONITOR", "main", "127.0.0.1", ports[0], 1)
        yield sentinels, "redis+sentinel://127.0.0.1:{},127.0.0.1:{}/main".format(*ports[1:])


async def test_a_sentinel_that_stands_still_delays_nobody() -> None:
    """The host of the first one is away, often together with the primary."""
    with watched() as (sentinels, url):
        sentinels[0].stop()
        async with redis_tier(url) as tier, asyncio.timeout(4.0):
            assert await got(tier, await put(tier, chunk(1)))


async def test_a_line_to_a_sentinel_that_is_never_answered_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer keeps it although nobody is behind it any more: all later questions wait for the same answer."""
    monkeypatch.setattr(topology, "SENTINEL_S_MAX", 0.2)
    with watched() as (sentinels, _), socket.create_server(("127.0.0.1", 0)) as nobody:
        with Proxy(nobody.getsockname()[:2]) as name:
            url = "redis+sentinel://{}:{}/main".format(*name.address)
            primary = topology_of(RedisSettings(url=url), RedisAddress.of(url), 2)
            asked = asyncio.ensure_future(primary.server_of(b""))
            kept, _ = await asyncio.to_thread(nobody.accept)
            name.lead_to(("127.0.0.1", sentinels[0].port))
            async with asyncio.timeout(20.0):
                await asked
            kept.close()
            await primary.close()


class Word:
    """A Sentinel that says at once where the primary is; ``is_deaf``: it stands still, and so does redis-py, which may
    go on reading after it was cancelled."""

    def __init__(self, *, is_deaf: bool) -> None:
        self.is_deaf = is_deaf
        self.asked = 0
        self.connection_pool = SimpleNamespace(connection_kwargs={"host": "h", "port": 1})

    async def sentinel_masters(self) -> dict[str, dict[str, object]]:
        self.asked += 1
        while self.is_deaf:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.1)
        state = {"is_master": True, "is_sdown": False, "is_odown": False, "num-other-sentinels": 1}
        return {"main": {**state, "ip": "127.0.0.1", "port": 7}}

    async def aclose(self) -> None:
        return None


async def test_a_sentinel_that_stands_still_is_asked_once_and_not_waited_for() -> None:
    sentinels: Any = Sentinels([("h", 1), ("h", 2)])
    sentinels.sentinels = deaf, quick = [Word(is_deaf=True), Word(is_deaf=False)]
    async with asyncio.timeout(5.0):
        for _ in range(3):
            assert await sentinels.discover_master("main") == ("127.0.0.1", 7)
        assert (deaf.asked, quick.asked) == (1, 3)
        deaf.is_deaf = False
        await sentinels.close()


async def test_sentinels_that_fail_in_turn_are_all_asked_again() -> None:
    with watched() as (sentinels, url):
        primary = topology_of(RedisSettings(url=url), RedisAddress.of(url), 2)
        for one in sentinels:
            one.kill()
            primary.doubt()
            clients = [primary.client.ping() for _ in range(4)]  # each connects, and asks who the primary is
            assert all(await asyncio.gather(*clients, primary.server_of(b"")))
            await primary.reconnect()
            one.start()
        await primary.close()


async def test_sentinels_have_a_password_of_their_own(tmp_path: Path) -> None:
    file, ports = tmp_path / "sentinels", [free_port() for _ in range(2)]
    file.write_text("theirs")
    with ExitStack() as stack:
        stack.enter_context(RedisServer("--requirepass", "pw", port=ports[0]))
        sentinel = stack.enter_context(RedisServer("--requirepass", "theirs", port=ports[1], is_sentinel=True))
        asked = sentinel.client(password="theirs")
        asked.execute_command("SENTINEL", "MONITOR", "main", "127.0.0.1", ports[0], 1)
        asked.execute_command("SENTINEL", "SET", "main", "auth-pass", "pw")
        url = f"redis+sentinel://:pw@127.0.0.1:{ports[1]}/main"
        async with redis_tier(url, sentinel_password_file=str(file)) as tier:
            await put(tier, chunk(1))
            assert await got(tier, chunk(1))
        async with redis_tier(url) as tier:
            with pytest.raises(Unavailable, match=r"tiers\.redis\.sentinel_password_file"):
                await put(tier, chunk(1))
