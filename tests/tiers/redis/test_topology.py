"""Servers that are several: a cluster of three primaries; and an encrypted line. All real processes."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from kvstore.chunk import ChunkLayout, layout_of
from kvstore.config import RedisAddress, RedisSettings
from kvstore.errors import DeadlineExceeded, PermissionDenied, Unavailable
from kvstore.spec import CacheKind, LayerSpec
from kvstore.tiers import PART, UploadState
from kvstore.tiers.redis import errands
from kvstore.tiers.redis.access import Access, Server
from kvstore.tiers.redis.line import Line
from kvstore.tiers.redis.replies import CLUSTER_RIGHTS, RIGHTS
from tests.contracts.chunks import SMALL, Chunk, chunk
from tests.fakes.redis_server import KEYS, NO_OTHER, RedisServer, other_binary
from tests.fakes.tls import encrypted, made_certificates
from tests.ports import free_port
from tests.specs import small_spec
from tests.tiers.redis.tiers import got, put, redis_tier, until

SLOT_COUNT = 16384
COUNT = 24
MANY_FIELDS = layout_of(
    small_spec(layers=(LayerSpec(kv_heads=4, k_dim=256, v_dim=256),) * 3, chunk_tokens=500), CacheKind.KV, 500
)
"""Three slabs of 2 MB: two fields."""


class Cluster:
    """Three primaries, each with a third of the slots."""

    def __init__(self, stack: ExitStack, program: Path | None) -> None:
        options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf")
        self.servers = [stack.enter_context(RedisServer(*options, port=free_port(), program=program)) for _ in range(3)]
        self.join()

    def join(self) -> None:
        """Make a cluster of nodes that have met nobody. Returns when each finds it in order."""
        for number, server in enumerate(self.servers):
            client = server.client()
            first, stop = (SLOT_COUNT * each // 3 for each in (number, number + 1))
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, stop))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", self.servers[0].port)
        until_s = time.monotonic() + 20
        while not all(self._is_ready(server) for server in self.servers):
            assert time.monotonic() < until_s, "the cluster does not come up"
            time.sleep(0.05)

    def _is_ready(self, server: RedisServer) -> bool:
        info = str(server.client().execute_command("CLUSTER", "INFO"))
        return "cluster_state:ok" in info and "cluster_known_nodes:3" in info

    @property
    def url(self) -> str:
        return f"redis+cluster://127.0.0.1:{self.servers[0].port},127.0.0.1:{self.servers[1].port}"

    def client(self) -> Any:
        return redis.RedisCluster(host="127.0.0.1", port=self.servers[0].port)

    def name_of(self, number: int) -> str:
        return str(self.servers[number].client().execute_command("CLUSTER", "MYID").decode())

    def owner_of(self, key: bytes) -> int:
        """Which of the three has a key's slot."""
        for start, stop, *nodes in self.servers[0].client().execute_command("CLUSTER", "SLOTS"):
            if start <= key_slot(key) <= stop:
                return [each.port for each in self.servers].index(nodes[0][1])
        raise AssertionError("nobody has the slot")

    def move(self, key: bytes, target: int) -> None:
        """A slot, with what is in it, as an operator does."""
        source = self.begin(key, target)
        self.carry(key, source, target)
        self.end(key, target)

    def begin(self, key: bytes, target: int) -> int:
        """From now on a slot is on its way from its node, which is returned."""
        slot, source = key_slot(key), self.owner_of(key)
        to, at = self.servers[target].client(), self.servers[source].client()
        to.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.name_of(source))
        at.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.name_of(target))
        return source

    def carry(self, key: bytes, source: int, target: int) -> None:
        """What is in its slot."""
        at = self.servers[source].client()
        for each in at.execute_command("CLUSTER", "GETKEYSINSLOT", key_slot(key), 100):
            at.execute_command("MIGRATE", "127.0.0.1", self.servers[target].port, each, 0, 5000)

    def end(self, key: bytes, target: int) -> None:
        """All nodes know at once where the slot is now."""
        for server in self.servers:
            server.client().execute_command("CLUSTER", "SETSLOT", key_slot(key), "NODE", self.name_of(target))


@pytest.fixture(scope="module", params=["of all tests", "another"])
def program(request: pytest.FixtureRequest) -> Path | None:
    """Which server a cluster is made of."""
    found = other_binary() if request.param == "another" else None
    if request.param == "another" and found is None:
        pytest.skip(NO_OTHER)
    return found


@pytest.fixture(scope="module")
def cluster(program: Path | None) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, program)


def key_of(what: Chunk) -> bytes:
    return KEYS.chunk(what.header.storage_key)


async def test_a_cluster_has_chunks_on_all_its_nodes(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "ACCOUNT_EVERY", 1)
    chunks = [chunk(number) for number in range(COUNT)]
    async with redis_tier(cluster.url) as tier, redis_tier(cluster.url) as other:
        await asyncio.gather(*(put(tier, each) for each in chunks))
        assert all(await asyncio.gather(*(got(other, each) for each in chunks)))
        assert all(server.client().dbsize() for server in cluster.servers)
        keys = [each.header.storage_key for each in chunks]
        assert await tier.probe([*keys, bytes(32)], 5.0) == [True] * COUNT + [False]
        await until(lambda: tier.statistics().capacity_bytes)
        assert tier.statistics().chunk_count == 0  # there are more keys than chunks
        for each in cluster.servers:
            for key in each.client().keys("*"):
                each.client().expire(key, 60)
        assert all(await asyncio.gather(*(got(tier, each) for each in chunks)))
        await until(lambda: all(s.client().ttl(key) > 60 for s in cluster.servers for key in s.client().keys("*")))
        await tier.remove(keys)
        assert await tier.probe(keys, 5.0) == [False] * COUNT


async def test_a_question_whose_time_is_over_at_once_asks_nothing(
    cluster: Cluster, recwarn: pytest.WarningsRecorder
) -> None:
    """Python warns of what was begun and never awaited, in the service's log."""
    keys = [chunk(number).header.storage_key for number in range(COUNT)]
    async with redis_tier(cluster.url) as tier:
        await tier.probe(keys, 20.0)
        for _ in range(8):
            with pytest.raises(DeadlineExceeded):
                await tier.probe(keys, 0.0)
        gc.collect()
        assert not [str(each.message) for each in recwarn if "never awaited" in str(each.message)]
        assert None not in await tier.probe(keys, 20.0)


async def test_what_a_node_is_about_to_write_is_claimed_on_each_chunks_own_node(cluster: Cluster) -> None:
    chunks = [chunk(number) for number in range(300, 308)]
    keys = [each.header.storage_key for each in chunks]
    there, free, taken = [UploadState.THERE], [UploadState.FREE], [UploadState.TAKEN]
    async with redis_tier(cluster.url) as one, redis_tier(cluster.url) as other:
        await put(one, chunks[0])
        for _ in range(2):  # one's own claim is made anew
            assert await one.claim(keys, 60.0, 5.0) == there + 7 * free
        assert await other.claim(keys, 60.0, 5.0) == there + 7 * taken
        await one.claim(keys, 600.0, 5.0)
        client = cluster.client()
        assert all(client.pttl(KEYS.claim(key, "redis")) > 500_000 for key in keys[1:])
        await asyncio.gather(*(put(one, each) for each in chunks))
        assert await other.claim(keys, 60.0, 5.0) == 8 * there
        await one.remove(keys)
        assert await other.claim(keys, 60.0, 5.0) == 8 * free, "what is written is claimed no more"


async def test_a_slot_that_moves_costs_one_more_try(cluster: Cluster) -> None:
    async with redis_tier(cluster.url) as tier:
        for number in range(100, 104):
            what = await put(tier, chunk(number))
            stored = await tier.open(what.name)
            assert stored is not None
            await stored.check(range(2))
            cluster.move(key_of(what), (cluster.owner_of(key_of(what)) + 1) % 3)
            if number % 2:
                await stored.check(range(2))
            else:
                await put(tier, chunk(number, write=1))
                what = chunk(number, write=1)
            assert await got(tier, what)


@pytest.mark.parametrize("layout", [SMALL, MANY_FIELDS], ids=["small", "many fields"])
async def test_while_a_slot_is_on_its_way_its_chunks_are_read_at_both_ends(
    cluster: Cluster, layout: ChunkLayout
) -> None:
    async with redis_tier(cluster.url) as tier:
        whats = [await put(tier, chunk(number, layout)) for number in range(200, 210)]
        what, key = whats[0], key_of(whats[0])
        await asyncio.gather(*(got(tier, each) for each in whats * 4))  # by now each node has several connections
        opened = [await tier.open(what.name) for _ in range(2)]
        target = (cluster.owner_of(key) + 1) % 3
        source = cluster.begin(key, target)
        for state in ("here", "there", "gone"):
            if state == "there":
                cluster.carry(key, source, target)
            if state == "gone":
                await tier.remove([what.header.storage_key])
            is_there = state != "gone"
            assert await got(tier, what) == is_there
            assert await tier.probe([each.header.storage_key for each in whats], 5.0) == [is_there] + [True] * 9
            await tier.touch([each.header.storage_key for each in whats])
            for stored in opened if is_there else []:
                assert stored is not None
                await stored.check(range(len(layout.slabs)))
        cluster.end(key, target)
        await put(tier, what)
        assert await got(tier, what)


async def test_a_chunk_whose_slot_is_on_its_way_is_written_later(cluster: Cluster) -> None:
    """Its two names would be at two nodes: TRYAGAIN."""
    async with redis_tier(cluster.url) as tier:
        what = chunk(220)
        target = (cluster.owner_of(key_of(what)) + 1) % 3
        source = cluster.begin(key_of(what), target)
        for _ in range(3):
            with pytest.raises(Unavailable, match="again later"):
                await put(tier, what)
        cluster.carry(key_of(what), source, target)
        cluster.end(key_of(what), target)
        await put(tier, what)
        assert await got(tier, what)


async def test_a_user_of_a_cluster_has_enough_with_the_rights_that_the_message_names(cluster: Cluster) -> None:
    for server in cluster.servers:
        server.client().execute_command("ACL", "SETUSER", "writer", "reset", "on", ">pw", "~kvstore:*", "+ping")
    url = cluster.url.replace("//", "//writer:pw@")
    async with redis_tier(url) as tier:
        with pytest.raises(PermissionDenied) as refused:
            await put(tier, chunk(230))
    assert set(CLUSTER_RIGHTS) <= set(re.findall(r"\b[A-Z]{3,}\b", str(refused.value)))
    rights = ["+" + name.lower() for name in (*RIGHTS, *CLUSTER_RIGHTS)]
    for server in cluster.servers:
        server.client().execute_command("ACL", "SETUSER", "writer", *rights)
    async with redis_tier(url) as tier:
        whats = [await put(tier, chunk(number)) for number in range(230, 240)]
        assert all([await got(tier, each) for each in whats])
        await until(lambda: tier.statistics().file_bytes)
        key, target = key_of(whats[0]), (cluster.owner_of(key_of(whats[0])) + 1) % 3
        source = cluster.begin(key, target)
        cluster.carry(key, source, target)
        assert await got(tier, whats[0])
        cluster.end(key, target)
        assert await tier.probe([each.header.storage_key for each in whats], 5.0) == [True] * 10
        await tier.remove([each.header.storage_key for each in whats])


async def test_a_node_of_a_cluster_that_is_named_as_a_server_says_so(cluster: Cluster) -> None:
    async with redis_tier(cluster.servers[0].url) as tier:
        said = []
        for number in range(6):
            try:
                await put(tier, chunk(number))
            except Unavailable as error:
                said.append(error.message)
        assert said
        assert all("redis+cluster://" in each for each in said)


async def test_a_node_that_dies_costs_its_chunks_and_no_others(program: Path | None) -> None:
    with ExitStack() as stack:
        cluster = Cluster(stack, program)
        for server in cluster.servers:
            server.client().config_set("cluster-require-full-coverage", "no")
        chunks = [chunk(number) for number in range(COUNT)]
        async with redis_tier(cluster.url) as tier:
            for each in chunks:
                await put(tier, each)
            lost = [cluster.owner_of(key_of(each)) == 2 for each in chunks]
            assert any(lost)
            cluster.servers[2].kill()
            found = await asyncio.gather(*(got(tier, each) for each in chunks), return_exceptions=True)
            for each, is_lost in zip(found, lost, strict=True):
                assert isinstance(each, Unavailable) if is_lost else each is True
            written = await asyncio.gather(*(put(tier, each) for each in chunks), return_exceptions=True)
            assert [isinstance(each, Unavailable) for each in written] == lost
            assert all(PART in each.fields for each in (*found, *written) if isinstance(each, Unavailable))
            for first in (True, False):  # whichever is asked for first
                asked = sorted(zip(lost, chunks, strict=True), key=lambda each: each[0] is first, reverse=True)
                there = await tier.probe([each.header.storage_key for _, each in asked], 5.0)
                assert there == [None if each else True for each, _ in asked], "what the others have is found"
            left = key_of(next(each for each, is_lost in zip(chunks, lost, strict=True) if not is_lost))
            gone = key_of(next(each for each, is_lost in zip(chunks, lost, strict=True) if is_lost))
            client = cluster.servers[cluster.owner_of(left)].client()
            client.pexpire(left, 60_000)
            for each in (gone, left):
                tier._errands.used(each)
            await until(lambda: client.ttl(left) > 60, 20.0)
            for each in (gone, left):
                tier._errands.given_up(each)
            await until(lambda: not client.exists(left), 20.0)


async def test_a_slot_without_a_node_costs_its_chunks_and_no_others(program: Path | None) -> None:
    """An operator took it away, or a fail-over left it out."""
    chunks = [chunk(number) for number in range(COUNT)]
    keys = [each.header.storage_key for each in chunks]
    with ExitStack() as stack:
        cluster = Cluster(stack, program)
        for server in cluster.servers:
            server.client().config_set("cluster-require-full-coverage", "no")
        async with redis_tier(cluster.url) as tier:
            for each in chunks:
                await put(tier, each)
        for server in cluster.servers:
            server.client().execute_command("CLUSTER", "DELSLOTS", key_slot(key_of(chunks[0])))
        async with redis_tier(cluster.url) as tier:
            assert await tier.probe(keys, 5.0) == [None, *[True] * (COUNT - 1)]
            found = await asyncio.gather(*(got(tier, each) for each in chunks), return_exceptions=True)
            assert isinstance(found[0], Unavailable)
            assert "CLUSTER INFO" in found[0].message
            assert found[1:] == [True] * (COUNT - 1)


# ---------------------------------------------------------------- TLS


async def test_an_encrypted_line_wants_the_right_certificates(tmp_path: Path) -> None:
    made_certificates(tmp_path)
    files = {name: str(tmp_path / file) for name, file in
             (("ca_file", "ca.crt"), ("certificate_file", "client.crt"), ("key_file", "client.key"))}  # fmt: skip
    with RedisServer("--requirepass", "pw") as engine:
        async with encrypted(engine.path, tmp_path, wants_certificate=True) as port:
            url = f"rediss://:pw@127.0.0.1:{port}"
            async with redis_tier(url, **files) as tier:
                for which in (chunk(1), chunk(2, MANY_FIELDS)):
                    await put(tier, which)
                    assert await got(tier, which)
                assert await tier.probe([chunk(1).header.storage_key], 5.0) == [True]
            strange = {"certificate_file": str(tmp_path / "stranger.crt"), "key_file": str(tmp_path / "stranger.key")}
            without = {"certificate_file": "", "key_file": ""}
            absent = {"ca_file": str(tmp_path / "absent")}
            for wrong in ({"ca_file": ""}, {"ca_file": strange["certificate_file"]}, strange, without, absent):
                async with redis_tier(url, **{**files, **wrong}) as tier:
                    for call in (put(tier, chunk(3)), tier.open(chunk(1).name)):
                        with pytest.raises(Unavailable, match=r"tiers\.redis"):
                            await call
                settings = RedisSettings(url=url, **{**files, **wrong})
                server = Server(Access.of(settings, RedisAddress.of(url)), "127.0.0.1", port)
                with pytest.raises(Unavailable, match=r"tiers\.redis"):  # as a byte mover connects
                    await asyncio.to_thread(Line, server, time.monotonic() + 5.0)
