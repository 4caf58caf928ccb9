"""A node that begins brings by itself what another one fetches most, as soon as an engine registers the model."""

from __future__ import annotations

import pytest
from kvstore_client import Client, Tier, connect

from tests.e2e.test_nvme import same
from tests.e2e.two_nodes import MEMORY_BYTES, Cluster, quiet, two_nodes
from tests.outage.load import SPEC, cache, tokens
from tests.server.raw import eventually

pytestmark = [pytest.mark.redis, pytest.mark.s3]
HOT, COLD, OTHERS = (1, 2, 3), (4, 5), (6, 7)
CHUNK_BYTES = 68 << 10
"""Of SPEC, header included; each context has two."""
HINTS = "kvstore:v1:hot:*"


def hot_on_a(cluster: Cluster) -> None:
    """Have A fetch HOT most, and leave hints for it."""
    with connect(cluster.a.socket_address) as client:
        for seed in (*HOT, *COLD):
            client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
        quiet(client)
        for seed in HOT * 3:
            assert client.fetch(SPEC, tokens(seed)).token_count == len(tokens(seed))
        eventually(lambda: len(cluster.redis.client().keys(HINTS)) == 1, 20.0)


def registered(client: Client) -> None:
    client.lookup(SPEC, tokens(99))


def near_count(client: Client) -> int:
    """Return the number of HOT's chunks in memory: those on their way do not count."""
    found = [client.lookup(SPEC, tokens(seed)).chunks for seed in HOT]
    return sum(each.tier is Tier.DRAM for chunks in found for each in chunks)


def chunk_count(client: Client) -> int:
    return int(client.stats().arena.chunk_count)


def test_a_new_node_is_warm_before_the_first_request() -> None:
    with two_nodes(nvme="0", POLICY__WARM_UP_BYTES="1 GiB") as cluster:
        hot_on_a(cluster)
        with connect(cluster.b.socket_address) as client:
            registered(client)
            eventually(lambda: near_count(client) == 2 * len(HOT), 20.0)
            for seed in HOT:
                found = client.fetch(SPEC, tokens(seed), verify=True)
                assert (found.tier, found.token_count) == (Tier.DRAM, len(tokens(seed)))
                assert same(found, cache(seed), found.token_count)
            assert client.fetch(SPEC, tokens(COLD[0])).tier is Tier.REDIS, "what nobody fetches was not brought"
            assert client.stats().arena.used_bytes <= 0.9 * MEMORY_BYTES


def test_no_more_than_the_setting_says_is_brought() -> None:
    with two_nodes(nvme="0", POLICY__WARM_UP_BYTES=str(3 * CHUNK_BYTES)) as cluster:
        hot_on_a(cluster)
        with connect(cluster.b.socket_address) as client:
            registered(client)
            eventually(lambda: near_count(client) == 3, 20.0)
            assert chunk_count(client) == 3


def test_without_the_setting_nothing_is_brought_and_no_hint_is_left() -> None:
    with two_nodes(nvme="0") as cluster:
        with connect(cluster.a.socket_address) as client:
            client.store(SPEC, tokens(1), cache(1)).wait(10.0)
            quiet(client)
            client.fetch(SPEC, tokens(1))
        with connect(cluster.b.socket_address) as client:
            registered(client)
            assert chunk_count(client) == 0
        assert not cluster.redis.client().keys(HINTS)
