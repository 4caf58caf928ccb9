"""What happens on the lines to a Redis server: they alter bytes, break, fall silent, and readers leave."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.chunk import layout_of
from kvstore.errors import DataLoss, DeadlineExceeded, KVStoreError, Unavailable
from kvstore.seams import SystemClock
from kvstore.spec import CacheKind, LayerSpec
from kvstore.spec.model import LAYER_COUNT_MAX
from kvstore.tiers import pace
from kvstore.tiers.redis import control, line, reads
from kvstore.tiers.redis import tier as tier_module
from kvstore.tiers.redis.access import Access, Server
from kvstore.tiers.redis.names import fields_of
from kvstore.tiers.redis.replies import refusal
from tests.contracts.chunks import chunk
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.specs import small_spec
from tests.tiers.redis.tiers import MANY_FIELDS, MIB, got, put, redis_tier, until


async def test_bytes_that_a_line_alters_are_never_given(server: RedisServer) -> None:
    """A bit of every so many pieces flips: whatever it hits, the read fails, and later ones are right."""
    rng = np.random.default_rng(3)
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1, MANY_FIELDS))

            def alter(piece: bytes) -> bytes:
                altered = bytearray(piece)
                altered[rng.integers(len(piece))] ^= 1 << rng.integers(8)
                return bytes(altered) if rng.random() < 0.05 else piece

            outcomes = set()
            for _ in range(20):
                proxy.alter = alter
                try:
                    outcomes.add(await got(tier, what))
                except KVStoreError as error:
                    outcomes.add(type(error))
                proxy.mend()
            assert DataLoss in outcomes
            async with asyncio.timeout(20):
                while True:
                    try:
                        assert await got(tier, what)
                        break
                    except Unavailable:
                        await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_near", [True, False])
async def test_a_server_on_a_unix_socket_is_asked_for_one_field_at_a_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, is_near: bool
) -> None:
    """One at an address, which may be far, has the next field on its way meanwhile."""
    awaited = set()
    send = line.Line.send

    def sent(self: line.Line, parts: list[line.Sent], reply_count: int = 1) -> None:
        send(self, parts, reply_count)
        if b"HGET" in bytes(parts[0]):
            awaited.add(self.awaited)

    monkeypatch.setattr(line.Line, "send", sent)
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(server.url if is_near else f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1, MANY_FIELDS))
            assert await got(tier, what)
    assert max(awaited) == (1 if is_near else 2)


async def test_a_field_in_more_pieces_than_the_kernel_takes_at_once_is_written(server: RedisServer) -> None:
    """As the smallest slabs of the longest model are, where memory is split among them."""
    spec = small_spec(layers=(LayerSpec(kv_heads=1, k_dim=8, v_dim=8),) * LAYER_COUNT_MAX)
    many = layout_of(spec, CacheKind.KV, 16)
    assert len(fields_of(many)) == 1
    async with redis_tier(server.url) as tier:
        what = chunk(1, many)
        await tier.write(what.header, many, [piece.copy() for piece in what.pieces])
        assert await got(tier, what)


async def test_a_line_that_is_cut_in_a_reply_is_made_anew(server: RedisServer) -> None:
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1, MANY_FIELDS))
            stored = await tier.open(what.name)
            assert stored is not None
            for at in (0, 5, 4096, 3 * MIB):
                proxy.cut_after_bytes = at
                with pytest.raises(Unavailable, match=r"tiers\.redis\.url"):
                    await stored.check(range(10))
                proxy.mend()
                await stored.check(range(10))
                assert await got(tier, what)


async def test_a_kept_line_that_the_server_closed_unnoticed_costs_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hangs up between the look at the line and its use."""
    async with redis_tier(server.url) as tier:
        what = await put(tier, chunk(1, MANY_FIELDS))
        assert await got(tier, what)
        monkeypatch.setattr(line.Line, "is_idle", True)
        for _ in range(2):
            with server.client() as client:
                client.client_kill_filter(_type="normal", skipme=True)
            assert await got(tier, what)
            await put(tier, what)


def test_what_a_server_says_unasked_is_no_reply(tmp_path: Path) -> None:
    """A kept line on which something waits is not used again. What is said on a unix socket is there at once."""
    was_heard, was_said = threading.Event(), threading.Event()

    def serve(listener: socket.socket) -> None:
        with listener.accept()[0] as kept:
            answer(kept, b"+PONG\r\n")
            answer(kept, b"+one\r\n")
            was_heard.wait()
            kept.sendall(b"+unasked\r\n")
            was_said.set()
            with listener.accept()[0] as anew:
                answer(anew, b"+PONG\r\n")
                answer(anew, b"+two\r\n")

    def answer(peer: socket.socket, reply: bytes) -> None:
        assert peer.recv(4096)
        peer.sendall(reply)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        server, until_s = Server(Access(), path=str(tmp_path / "socket")), SystemClock().monotonic() + 20.0
        assert line.on_line(server, until_s, lambda one: one.ask(b"GET", b"1")) == b"one"
        was_heard.set()
        assert was_said.wait(10)
        assert line.on_line(server, until_s, lambda one: one.ask(b"GET", b"2")) == b"two"
        thread.join()


def test_a_line_to_a_server_that_gives_nothing_now_is_not_kept(server: RedisServer) -> None:
    """By another one its name may lead to another server, as after a fail-over: the old primary loads its data anew."""
    there, until_s = Server(Access(), path=server.path), SystemClock().monotonic() + 20.0

    def loads(one: line.Line) -> bytes:
        one.ask(b"PING")
        raise refusal("LOADING Redis is loading the dataset in memory", server.path)

    with pytest.raises(Unavailable, match="loading"):
        line.on_line(there, until_s, loads)
    assert there not in line._kept.lines


def test_a_line_that_nobody_uses_is_not_kept_for_ever(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that left a cluster is asked by no thread again."""
    lines = line._kept.lines
    until_s = SystemClock().monotonic() + 20.0
    with RedisServer() as left:
        gone, other = Server(Access(), path=left.path), Server(Access(), path=server.path)
        for each in (gone, other):
            line.on_line(each, until_s, lambda one: one.ask(b"PING"))
        assert {gone, other} <= lines.keys()
        kept = lines[gone]
        monkeypatch.setattr(line, "KEPT_S_MAX", 0.0)
        line.on_line(other, until_s, lambda one: one.ask(b"PING"))
        assert gone not in lines
        assert kept._socket.fileno() < 0


def test_a_line_to_the_same_server_that_was_not_used_for_long_is_made_anew(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall forgets a line on which nothing passes, and tells nobody."""
    until_s = SystemClock().monotonic() + 20.0
    with Proxy(server.path) as forgotten, Proxy(forgotten.address) as way:
        away = Server(Access(), *way.address)
        assert line.on_line(away, until_s, lambda one: one.ask(b"PING")) == b"PONG"
        way.lead_to(server.path)
        forgotten.is_silent = True
        monkeypatch.setattr(line, "KEPT_S_MAX", 0.0)
        assert line.on_line(away, until_s, lambda one: one.ask(b"PING")) == b"PONG"


async def test_jobs_end_although_the_server_is_silent(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a read, of a write, and before a connection is made."""
    monkeypatch.setattr(line, "SILENCE_S_MAX", 0.3)
    monkeypatch.setattr(line, "CONNECT_S_MAX", 0.3)
    monkeypatch.setattr(control, "CALL_S_MAX", 0.3)
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1, MANY_FIELDS))
            stored = await tier.open(what.name)
            assert stored is not None
            proxy.is_silent = True
            checks = [stored.check(range(10)) for _ in range(20)]
            async with asyncio.timeout(10):
                found = await asyncio.gather(*checks, put(tier, chunk(2)), return_exceptions=True)
            assert {type(each) for each in found} == {Unavailable}
            assert tier.stalled_s() == 0.0, "nobody waits any more"
            proxy.mend()
            await stored.check(range(10))
            assert await got(tier, what)


@pytest.mark.parametrize("way", ["read", "write"])
@pytest.mark.parametrize("is_enough", [True, False])
async def test_a_job_has_time_for_its_bytes(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, way: str, is_enough: bool
) -> None:
    """A large chunk on a slow line would never arrive within a limit that knows no bytes."""
    what = chunk(1, MANY_FIELDS)
    async with redis_tier(server.url) as tier:
        await put(tier, what)
    for module in (tier_module, reads):
        monkeypatch.setattr(module, "JOB_S_MAX", 0.1)
    monkeypatch.setattr(pace, "BYTES_PER_S_MIN", 1e5 if is_enough else 1e12)
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            proxy.bytes_per_s = 20e6
            moving = put(tier, what) if way == "write" else got(tier, what)
            if is_enough:
                assert await moving
            else:
                with pytest.raises(Unavailable, match="took too long"):
                    await moving


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_large_chunk_on_a_slow_line_is_no_stall(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Reads and writes side by side take their time on it, and the server is asked meanwhile."""
    what = chunk(1, MANY_FIELDS)
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            await put(tier, what)
            for rate, is_stalled in ((1.0, False), (1e12, True)):
                monkeypatch.setattr(pace, "SLOW_BYTES_PER_S", rate)
                stored = await tier.open(what.name)
                assert stored is not None
                proxy.is_silent = True
                moving = asyncio.ensure_future(stored.check(range(10)) if way == "read" else put(tier, what))
                await asyncio.sleep(0.05)
                assert bool(tier.stalled_s()) is is_stalled
                proxy.mend()
                await moving


async def test_a_write_that_begins_while_the_server_is_silent_hides_no_stall(server: RedisServer) -> None:
    """Which server is to be asked is known without it: that is no sign of life."""
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1))
            proxy.is_silent = True
            waiting = asyncio.ensure_future(tier.open(what.name))
            await asyncio.sleep(0.3)
            moving = asyncio.ensure_future(put(tier, chunk(2)))
            await asyncio.sleep(0.1)
            assert tier.stalled_s() >= 0.35
            proxy.mend()
            await asyncio.gather(waiting, moving, return_exceptions=True)


async def test_a_cancelled_read_touches_its_memory_no_more(server: RedisServer) -> None:
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1, MANY_FIELDS))
            stored = await tier.open(what.name)
            assert stored is not None
            target = [np.zeros(slab.byte_count, np.uint8) for slab in MANY_FIELDS.slabs]
            proxy.bytes_per_s = 20e6
            reading = asyncio.ensure_future(stored.read(range(10), target))
            await until(lambda: target[0].any())
            reading.cancel()
            proxy.mend()
            await asyncio.gather(reading, return_exceptions=True)
            assert reading.cancelled()
            for each in target:
                each[:] = 0xDB
            await asyncio.sleep(0.1)
            assert all((each == 0xDB).all() for each in target)
            assert await got(tier, what)


async def test_a_probe_that_is_late_says_so(server: RedisServer) -> None:
    with Proxy(server.path) as proxy:
        host, port = proxy.address
        async with redis_tier(f"redis://{host}:{port}") as tier:
            what = await put(tier, chunk(1))
            proxy.is_silent = True
            with pytest.raises(DeadlineExceeded):
                await tier.probe([what.header.storage_key], 0.05)
            proxy.mend()
            assert await tier.probe([what.header.storage_key, bytes(32)], 5.0) == [True, False]
