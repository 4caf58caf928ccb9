"""A new node brings what another one fetches most, from the tiers that both share."""

from __future__ import annotations

import pytest
from kvstore_client import Tier, connect

from tests.e2e.test_nvme import same
from tests.e2e.two_nodes import MEMORY_BYTES, quiet, two_nodes
from tests.ops.command import run
from tests.outage.load import SPEC, cache, tokens

pytestmark = [pytest.mark.redis, pytest.mark.s3]
HOT, COLD = (1, 2, 3), (4, 5, 6)
CHUNKS = 2


def warmed(source: str, target: str, *more: str) -> dict[str, int]:
    done = run("warm", "--from", source, "--socket", target, "--json", *more)
    assert done.code in (0, 10), done.err
    return {what: each["chunk_count"] for what, each in done.json["outcomes"].items()}


def test_a_new_node_brings_what_another_fetches_most_and_no_more_than_has_room() -> None:
    with two_nodes(nvme="0") as cluster:
        one, other = cluster.a.socket_address, cluster.b.socket_address
        with connect(one) as client:
            for seed in (*HOT, *COLD):
                client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
            quiet(client)
            for seed in HOT * 3:
                client.fetch(SPEC, tokens(seed))
        silent = run("warm", "--from", other, "--socket", one)
        assert (silent.code, silent.err) == (0, "")
        assert "nobody fetched a prefix" in silent.out
        said = warmed(one, other)
        assert said == {"left out: model not registered here yet": len(HOT) * CHUNKS}, "no engine has come yet"
        with connect(other) as client:
            client.lookup(SPEC, tokens(99))  # an engine registers its model
            before = warmed(one, other, "--count", "3", "--dry-run")
            assert sum(before.values()) == len(HOT) * CHUNKS
            assert client.stats().arena.used_bytes == 0, "a dry run brings nothing"
            warmed(one, other, "--count", "3")
            for seed in HOT:
                found = client.fetch(SPEC, tokens(seed))
                assert (found.tier, found.token_count) == (Tier.DRAM, len(tokens(seed)))
                assert same(found, cache(seed), found.token_count)
            assert client.fetch(SPEC, tokens(COLD[0])).tier is Tier.REDIS, "what nobody fetches was not brought"
        with connect(one) as client:
            for seed in range(100, 140):  # many more than have room there
                client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
                client.fetch(SPEC, tokens(seed))
            quiet(client)
        said = warmed(one, other, "--count", "64")
        assert said["left out: memory is nearly full"] > 0
        with connect(other) as client:
            assert client.stats().arena.used_bytes <= 0.9 * MEMORY_BYTES
            assert {client.fetch(SPEC, tokens(seed)).tier for seed in HOT} == {Tier.DRAM}, "what was here stays"
