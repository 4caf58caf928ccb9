"""Nodes of a cluster that stand still, whose places others take, or that are all away. All real processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvstore.config import RedisAddress, RedisSettings
from kvstore.errors import Unavailable
from kvstore.tiers import PART
from kvstore.tiers.redis.tier import RedisTier
from kvstore.tiers.redis.topology import topology_of
from tests.contracts.chunks import Chunk, chunk
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import RedisServer
from tests.ports import free_port
from tests.tiers.redis.test_topology import COUNT, SLOT_COUNT, Cluster
from tests.tiers.redis.tiers import got, key_of, put, redis_tier, until

CHUNKS = [chunk(number) for number in range(COUNT)]
KEYS = [each.header.storage_key for each in CHUNKS]
BACK_S = 10.0
"""A node that answers again, or another one in its place, is used within so many seconds."""
CLUSTER_S = 20.0
"""Redis's own nodes agree within so many seconds."""
QUICK_S = 0.5
"""Less than anybody waits for a node that stands still."""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with ExitStack() as stack:
        made = Cluster(stack, None)
        for server in made.servers:
            server.client().config_set("cluster-require-full-coverage", "no")
        yield made


def lost_with(cluster: Cluster, number: int) -> list[bool]:
    """Which of the chunks lie on one of the nodes."""
    return [cluster.owner_of(key_of(each)) == number for each in CHUNKS]


def there_but(lost: list[bool]) -> list[bool | None]:
    """The answer of a probe when a node is away."""
    return [None if each else True for each in lost]


def has_met(server: RedisServer, count: int) -> bool:
    """Return True when a node has shaken hands with all of so many, itself counted."""
    flags = [each.split()[2] for each in server.client().execute_command("CLUSTER", "NODES").splitlines()]
    return len(flags) == count and not any(b"handshake" in each for each in flags)


def is_in_order(server: RedisServer) -> bool:
    """Return True when a node finds its cluster in order: until then it refuses commands."""
    return b"cluster_state:ok" in server.client().execute_command("CLUSTER", "INFO")


def owners_by(server: RedisServer) -> set[int]:
    """The ports of those that have slots, as a node has it."""
    return {nodes[0][1] for _, _, *nodes in server.client().execute_command("CLUSTER", "SLOTS")}


async def taken_over(replica: RedisServer, others: Sequence[RedisServer]) -> None:
    """Have a replica take its node's place, and return once all agree. Where it does not know its node's newest epoch
    yet, the others refuse it the slots, and it is a replica again: then it asks once more, as an operator would. Until
    they have told it so, it may as well take a newer epoch."""
    owners = {each.port for each in (*others, replica)}
    async with asyncio.timeout(CLUSTER_S):
        while not all(owners_by(each) == owners for each in (*others, replica)):
            is_replica = replica.client().execute_command("ROLE")[0] == b"slave"
            replica.client().execute_command("CLUSTER", *(("FAILOVER", "TAKEOVER") if is_replica else ("BUMPEPOCH",)))
            await asyncio.sleep(0.5)


async def all_known(tier: RedisTier) -> None:
    """Return once the nodes of all chunks answer."""
    found: Sequence[bool | None] = []
    try:
        async with asyncio.timeout(BACK_S):
            while None in (found := await tier.probe(KEYS, 5.0)):  # noqa: ASYNC110 - the nodes are other processes
                await asyncio.sleep(0.1)
    except TimeoutError:
        pytest.fail(f"some nodes did not answer: the last probe found {found}, the tier says {tier.statistics()}")


async def until_written(tier: RedisTier, chunks: Sequence[Chunk]) -> None:
    """Write chunks, each as often as it takes."""
    async with asyncio.timeout(BACK_S):
        for each in chunks:
            while True:
                try:
                    await put(tier, each)
                    break
                except Unavailable:
                    await asyncio.sleep(0.1)


async def test_a_node_that_stands_still_costs_its_chunks_and_no_others(cluster: Cluster) -> None:
    """Its host is away, and refuses no connection."""
    async with redis_tier(cluster.url) as tier:
        for each in CHUNKS:
            await put(tier, each)
        lost = lost_with(cluster, 2)
        one = KEYS[lost.index(True)]
        cluster.servers[2].stop()
        assert await tier.probe(KEYS, 5.0) == there_but(lost)
        assert tier.stalled_s() == 0.0
        for _ in range(4):  # nobody waits for it any more
            began_s = time.monotonic()
            assert await tier.probe(KEYS, 5.0) == there_but(lost)
            assert await tier.probe([one], 5.0) == [None], "what is asked of it alone is no outage of the others"
            found = await asyncio.gather(*(got(tier, each) for each in CHUNKS), return_exceptions=True)
            assert time.monotonic() - began_s < QUICK_S
            assert [isinstance(each, Unavailable) and PART in each.fields for each in found] == lost
        await until(lambda: "1 of 3 nodes" in tier.statistics().reason)
        assert str(cluster.servers[2].port) in tier.statistics().reason
        cluster.servers[2].go_on()
        await all_known(tier)
        assert all([await got(tier, each) for each in CHUNKS])
        await until(lambda: not tier.statistics().reason)


async def test_a_replica_that_takes_the_place_of_a_node_that_stands_still_is_found(cluster: Cluster) -> None:
    """Also by a node that only asks: no byte mover meets the old one."""
    with RedisServer("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", port=free_port()) as replica:
        client = replica.client()
        client.execute_command("CLUSTER", "MEET", "127.0.0.1", cluster.servers[0].port)
        client.config_set("cluster-require-full-coverage", "no")
        await until(lambda: all(has_met(each, 4) for each in (*cluster.servers, replica)), CLUSTER_S)
        client.execute_command("CLUSTER", "REPLICATE", cluster.name_of(2))
        await until(
            lambda: is_in_order(replica) and client.info("replication").get("master_link_status") == "up", CLUSTER_S
        )
        async with redis_tier(cluster.url) as tier:
            for each in CHUNKS:
                await put(tier, each)
            lost = lost_with(cluster, 2)
            await until(lambda: client.dbsize() >= sum(lost), CLUSTER_S)
            cluster.servers[2].stop()
            assert await tier.probe(KEYS, 5.0) == there_but(lost)
            await taken_over(replica, cluster.servers[:2])
            await until(lambda: is_in_order(replica), CLUSTER_S)
            await all_known(tier)
            assert all([await got(tier, each) for each in CHUNKS])


async def test_a_cluster_of_which_no_node_answers_is_an_outage(cluster: Cluster) -> None:
    async with redis_tier(cluster.url) as tier:
        await put(tier, CHUNKS[0])
        for server in cluster.servers:
            server.kill()
        async with asyncio.timeout(BACK_S):
            while True:
                with pytest.raises(Unavailable) as raised:
                    await tier.probe(KEYS, 5.0)
                if PART not in raised.value.fields:
                    break
                await asyncio.sleep(0.1)


async def test_connections_that_are_cut_again_and_again_are_made_anew(cluster: Cluster) -> None:
    """A balancer, or an operator, closes them under those who use them. No connection is closed by us meanwhile."""
    async with redis_tier(cluster.url) as tier:
        for each in CHUNKS:
            await put(tier, each)
        for _ in range(20):
            asked = asyncio.gather(*(got(tier, each) for each in CHUNKS * 2), return_exceptions=True)
            for server in cluster.servers:
                await asyncio.sleep(0.005)
                server.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            found = await asked
            assert all(each is True or isinstance(each, Unavailable) for each in found), found
        await all_known(tier)
        assert all(await asyncio.gather(*(got(tier, each) for each in CHUNKS * 2)))


async def test_a_node_that_is_back_while_others_are_asked_is_accounted_for(cluster: Cluster) -> None:
    settings = RedisSettings(url=cluster.url)
    nodes = topology_of(settings, RedisAddress.of(settings.url), 2).cluster
    assert nodes is not None
    assert [each["cluster_enabled"] for each in await nodes.ask_all("INFO")] == [1] * 3
    nodes._away[nodes.client.get_primaries()[0].name] = RedisTimeoutError("no answer")
    for server in cluster.servers:
        server.client().execute_command("CLIENT", "PAUSE", 300)
    asyncio.get_running_loop().call_later(0.1, nodes._away.clear)
    found = await nodes.ask_all("INFO")
    assert [type(each) for each in found] == [RedisTimeoutError, dict, dict]
    await nodes.close()


async def test_a_node_that_is_no_longer_of_the_cluster_is_asked_no_more(cluster: Cluster) -> None:
    """It lost its state, or was taken out, and answers that it has no slots: others have them by now."""
    async with redis_tier(cluster.url) as tier:
        for each in CHUNKS:
            await put(tier, each)
        lost = lost_with(cluster, 2)
        former = cluster.name_of(2)
        for word in ("FLUSHALL", "CLUSTER RESET HARD"):
            cluster.servers[2].client().execute_command(*word.split())
        assert await tier.probe(KEYS, 5.0) == there_but(lost)
        for server in cluster.servers[:2]:
            server.client().execute_command("CLUSTER", "FORGET", former)
        first, stop = (SLOT_COUNT * each // 3 for each in (2, 3))
        cluster.servers[0].client().execute_command("CLUSTER", "ADDSLOTS", *range(first, stop))
        await all_known(tier)
        assert await tier.probe(KEYS, 5.0) == [not each for each in lost]
        await until_written(tier, CHUNKS)


async def test_a_cluster_is_found_that_gets_its_slots_after_the_first_question() -> None:
    """All its nodes are new, or lost their state, until an operator gives them slots."""
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        for server in cluster.servers:
            server.client().execute_command("CLUSTER", "RESET", "HARD")
        async with redis_tier(cluster.url) as tier:
            with pytest.raises(Unavailable, match="CLUSTER INFO"):
                await tier.probe(KEYS, 5.0)
            cluster.join()
            await until_written(tier, CHUNKS)


async def test_a_cluster_is_found_again_whose_nodes_all_have_other_addresses() -> None:
    """As after a restart where addresses are lent: only the name in the settings leads to it."""
    with ExitStack() as stack, ExitStack() as former:
        old, new = Cluster(former, None), Cluster(stack, None)
        name = stack.enter_context(Proxy(("127.0.0.1", old.servers[0].port)))
        async with redis_tier("redis+cluster://{}:{}".format(*name.address)) as tier:
            await put(tier, CHUNKS[0])
            name.lead_to(("127.0.0.1", new.servers[0].port))
            former.close()
            await until_written(tier, CHUNKS)
            assert all([await got(tier, each) for each in CHUNKS])
