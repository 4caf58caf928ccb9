"""What Redis servers refuse, and what is said of it: away, passwords, rights, replicas, other services."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvstore.config import RedisSettings
from kvstore.errors import Exhausted, PermissionDenied, Unavailable
from kvstore.seams import SystemClock
from kvstore.tiers import IS_FULL
from kvstore.tiers.redis.claims import RedisClaims
from kvstore.tiers.redis.errands import _problem_of
from kvstore.tiers.redis.replies import NO_WRITES, RIGHTS, refusal
from kvstore.tiers.redis.tier import RedisTier
from tests.contracts.chunks import Chunk, chunk
from tests.fakes.redis_server import RedisServer
from tests.ports import free_port
from tests.tiers.redis.tiers import got, key_of, put, redis_tier, until


async def test_a_server_that_comes_later_is_taken_into_use(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as engine:
        engine.kill()
        async with redis_tier(engine.url) as tier:
            with pytest.raises(Unavailable, match=r"tiers\.redis\.url"):
                await put(tier, chunk(1))
            await until(lambda: tier.statistics().state == "failing")
            await asyncio.sleep(1.5)
            assert caplog.text.count("going on without the server") == 1
            engine.start()
            await put(tier, chunk(1))
            assert await got(tier, chunk(1))
            await until(lambda: tier.statistics().state == "up")
            engine.kill()
            engine.start()
            assert not await got(tier, chunk(1))
            await put(tier, chunk(1))
            assert await got(tier, chunk(1))


async def refusals(url: str, **settings: Any) -> list[str]:
    """What a read, a write and a probe say."""
    async with redis_tier(url, **settings) as tier:
        calls = [put(tier, chunk(1)), tier.open(chunk(1).name), tier.probe([bytes(32)], 5.0)]
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(each) for each in found} <= {Unavailable, PermissionDenied, type(None)}, found
    return [each.message for each in found if isinstance(each, Unavailable | PermissionDenied)]


async def test_passwords_are_asked_for_by_their_setting_and_may_change(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with RedisServer("--requirepass", "right") as engine:
        for said in await refusals(engine.url):
            assert "tiers.redis.password_file" in said
        for text in (b"wrong", b"", b"\xff"):
            file.write_bytes(text)
            for said in await refusals(engine.url, password_file=str(file)):
                assert "tiers.redis.password_file" in said
                assert "wrong" not in said.replace("wrong one", "")
        for said in await refusals(engine.url, password_file=str(tmp_path / "absent")):
            assert "absent" in said
        file.write_text("right\n")
        async with redis_tier(engine.url, password_file=str(file)) as tier:
            await put(tier, chunk(1))
            assert await got(tier, chunk(1))
            engine.client(password="right").config_set("requirepass", "another")
            engine.client(password="another").client_kill_filter(_type="normal", skipme=True)
            file.write_text("another")
            assert await got(tier, chunk(1))
        path = engine.path
        host_url = f"unix://:another@{path}"
        async with redis_tier(host_url) as tier:
            assert await got(tier, chunk(1))


async def test_a_password_file_may_come_later_and_is_named_until_then(tmp_path: Path) -> None:
    """As one that another service of the machine puts there: the node goes on without the server, as without any."""
    file = tmp_path / "password"
    with RedisServer("--requirepass", "right") as engine:
        async with redis_tier(engine.url, password_file=str(file)) as tier:
            tier.begin()
            await until(lambda: tier.statistics().state == "failing")
            assert tier.statistics().reason.startswith(f"tiers.redis.password_file = {file}")
            file.write_text("right")
            await until(lambda: tier.statistics().state == "up")
            await put(tier, chunk(1))
            assert await got(tier, chunk(1))


async def test_users_without_the_right_are_told_which_setting() -> None:
    with RedisServer() as engine:
        engine.client().execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+ping")
        url = f"unix://reader:pw@{engine.path}"
        for said in await refusals(url):
            assert "tiers.redis.username" in said
            assert "pw" not in said
            assert set(RIGHTS) <= set(re.findall(r"\b[A-Z]{3,}\b", said))
        only = ("reset", "on", ">pw", "~kvstore:*", *(f"+{name.lower()}" for name in RIGHTS))
        engine.client().execute_command("ACL", "SETUSER", "reader", *only)
        async with redis_tier(url) as tier:  # what the message names is enough
            what = await put(tier, chunk(1))
            assert await got(tier, what)
            assert await tier.probe([what.header.storage_key], 5.0) == [True]
            await until(lambda: tier.statistics().file_bytes)
            await tier.remove([what.header.storage_key])


async def test_a_replica_is_read_and_its_refusal_to_write_is_named() -> None:
    port = free_port()
    with RedisServer(port=port) as primary, RedisServer("--replicaof", "127.0.0.1", str(port)) as replica:
        async with redis_tier(primary.url) as tier:
            what = await put(tier, chunk(1))
        client = replica.client()
        await until(lambda: client.exists(key_of(what)))
        async with redis_tier(replica.url, write="never") as tier:
            assert await got(tier, what)
            with pytest.raises(PermissionDenied, match=r"tiers\.redis\.write = never"):
                await put(tier, chunk(2))
            assert await got(tier, what)
            assert tier.statistics().state == "read-only"


async def test_a_server_that_takes_no_writes_is_read_also_on_new_lines(tmp_path: Path) -> None:
    """It may not write, it cannot save its data (then it refuses PING, too), it has too few replicas."""
    lost = tmp_path / "lost"
    lost.mkdir()
    with RedisServer("--dir", str(lost)) as engine:  # Redis 7 lets no client change it
        client = engine.client()
        client.execute_command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+@read", "+@scripting", "+ping", "+info")
        async with redis_tier(engine.url) as tier:
            what = await put(tier, chunk(1))
        async with redis_tier(f"unix://reader:pw@{engine.path}") as tier:
            await is_read_only(tier, what)
        client.config_set("min-replicas-to-write", 1)
        async with redis_tier(engine.url) as tier:
            await is_read_only(tier, what)
            client.config_set("min-replicas-to-write", 0)
            await put(tier, chunk(2))
            assert tier.statistics().state == "up"
        client.config_set("save", "3600 1")
        lost.rmdir()
        client.bgsave()
        await until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        async with redis_tier(engine.url) as tier:  # its movers have no lines yet
            await is_read_only(tier, what)


async def is_read_only(tier: RedisTier, what: Chunk) -> None:
    """Every write is refused as one that this node may not make, and every read goes on."""
    for number in range(3):
        with pytest.raises(PermissionDenied):
            await put(tier, chunk(10 + number))
        assert await got(tier, what)
    assert await _problem_of(tier._errands._touch) == "", "a refusal to touch is an answer"
    assert tier.statistics().state == "read-only"


@pytest.mark.parametrize(
    "words",
    [
        "@user_script: 2: The user executing the script can't run this command or subcommand",
        "The user executing the script can't access at least one of the keys mentioned in the command arguments",
        "ACL failure in script: User reader has no permissions to run the 'pexpire' command",
    ],
)
def test_a_right_that_a_script_lacks_is_known(words: str) -> None:
    for code in ("ERR ", ""):  # as a line reads it, and as redis-py raises it
        for said in (f"Error running script (call to f_1): @user_script:2: {words}", f"{words} script: f1, on @u:2."):
            found = refusal(f"{code}{said}", "here")  # of Redis 6, and of Redis 7 and Valkey
            assert found.fields[NO_WRITES] == "NOPERM"


@pytest.mark.parametrize("code", ["NOPERM", "READONLY", "MISCONF", "NOREPLICAS"])
def test_a_refusal_within_a_script_is_known(code: str) -> None:
    found = refusal(f"ERR Error running script (call to f_1): @user_script:27: -{code} words", "here")
    assert found.fields[NO_WRITES] == code
    full = refusal("ERR Error running script: -OOM command not allowed", "here")
    assert type(full) is Exhausted
    assert IS_FULL in full.fields
    assert refusal("ERR ACL failure in script: User lacks permissions", "here").fields[NO_WRITES] == "NOPERM"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("MASTERDOWN Link with MASTER is down", "primary"),
        ("CLUSTERDOWN The cluster is down", "CLUSTER INFO"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "moving"),
        ("MOVED 1 127.0.0.1:1", "redis+cluster://"),
        ("ASK 1 127.0.0.1:1", "redis+cluster://"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "redis+cluster://"),
        ("ERR unknown command 'HSTRLEN'", "Redis 6.2"),
        ("ERR max number of clients reached", "clients"),
        ("MISCONF Redis is configured to save RDB snapshots", "persistence"),
    ],
)
async def test_other_refusals_say_what_to_do(reply: str, words: str) -> None:
    """From a server that says nothing else."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.startswith(b"*"):
                writer.write(f"-{reply}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        for said in await refusals(f"redis://127.0.0.1:{port}"):
            assert words in said
            assert "tiers.redis" in said


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$-2\r\n", b"\0" * 10000, b"*-1\r\n"])
async def test_what_is_no_redis_is_unavailable(reply: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(reply)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        assert len(await refusals(f"redis://127.0.0.1:{port}")) == 3


def test_a_server_with_too_many_clients_is_no_old_one() -> None:
    said = refusal("ERR max number of clients reached", "here").message
    assert "maxclients" in said
    assert "6.2" not in said


def test_a_password_that_a_server_repeats_goes_no_further() -> None:
    """One that does not know AUTH does."""
    for quotes in ("''", "``"):
        one, other = quotes
        text = f"ERR unknown command {one}AUTH{other}, with args beginning with: {one}u{other} {one}hunter2{other} "
        assert "AUTH" in refusal(text, "here").message
        assert "hunter2" not in refusal(text, "here").message


def test_a_password_is_in_no_error_of_redis_py(server: RedisServer) -> None:
    """What is chained to our errors may be logged."""
    with pytest.raises(redis.RedisError) as caught:
        redis.Redis(unix_socket_path=server.path, username="u", password="hunter2", retry=Retry(NoBackoff(), 0)).ping()
    assert "hunter2" not in repr(caught.value)
    assert os.path.exists(server.path)


async def test_answers_that_no_redis_gives_to_claims_fail_no_upload() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(4096):
            writer.write(b":no number\r\n" * 8)

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        claims = RedisClaims(RedisSettings(url=f"redis://127.0.0.1:{port}"), SystemClock())
        try:
            await claims.release([bytes(32)])
            assert await claims.claim([bytes(32)], 1.0) == [True]
        finally:
            await claims.close()
