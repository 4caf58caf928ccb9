"""What one node stored, a client of the other gets to the bit, by every door."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from kvstore_client import Client, EventKind, Match, Paged, connect, connect_async

from kvstore.errors import DataLoss
from kvstore.keys import chain_digests
from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.shared_tiers import Shared
from tests.e2e.sharing.scenes import (
    COUNT,
    KEEPS_E,
    SEEDS,
    SPEC,
    STEP,
    WHOLE,
    Nodes,
    cache,
    e_of,
    flood,
    get,
    give,
    given,
    places,
    quiet,
    tokens,
)
from tests.e2e.test_nvme import same
from tests.fakes import Switch
from tests.server.raw import eventually
from tests.specs import bits, tokens_of


@pytest.mark.parametrize("kind", [Tier.REDIS, Tier.S3])
@pytest.mark.parametrize("plane", ["local", "remote"])
def test_what_one_node_stored_another_ones_client_finds_and_fetches(
    nodes: Nodes, one: Client, shared: Shared, plane: str, kind: Tier
) -> None:
    seed = given(one)
    if kind is Tier.S3:
        shared.drop_all("redis")
    with connect(nodes.two.address if plane == "remote" else nodes.two.socket_address) as client:
        assert client.plane == plane
        match = client.lookup(SPEC, np.append(tokens(seed), [1, 2, 3]))
        assert match.prefix_token_count == COUNT
        assert [each.tier for each in match.chunks] == [kind] * 4 + [Tier.NONE]
        fetched = client.fetch(SPEC, tokens(seed), verify=True)
        assert (fetched.token_count, fetched.tier, fetched.reason) == (COUNT, kind, MissReason.NONE)
        assert same(fetched, cache(seed), COUNT)
        again = client.fetch(SPEC, tokens(seed))
        assert (again.token_count, again.tier) == (COUNT, Tier.DRAM), "what came stays"
        assert same(again, cache(seed), COUNT)


@pytest.mark.parametrize("plane", ["local", "remote"])
def test_into_pages_by_layers_and_beside_the_engine(nodes: Nodes, one: Client, plane: str) -> None:
    with connect(nodes.two.address if plane == "remote" else nodes.two.socket_address) as client:
        seed = given(one)
        pages = [np.zeros((2, COUNT // 16, 16, 2, 8), np.uint16) for _ in range(2)]
        order = np.random.default_rng(seed).permutation(COUNT // 16)
        slots = (order[:, None] * 16 + np.arange(16)).ravel()
        assert client.fetch(SPEC, tokens(seed), into=Paged(pages, slots)).tier is Tier.REDIS
        for paged, pair in zip(pages, cache(seed), strict=True):
            for plane_, kept in zip(paged, pair, strict=True):
                assert (plane_.reshape(COUNT, 2, 8)[slots] == kept.transpose(1, 0, 2)).all()
        seed = given(one)
        stream = client.fetch_layers(SPEC, tokens(seed), heads=(1, 2))
        assert (stream.token_count, stream.tier) == (COUNT, Tier.REDIS)
        for layer, (k, v) in stream:
            assert (bits(k) == cache(seed)[layer][0][1:2]).all()
            assert (bits(v) == cache(seed)[layer][1][1:2]).all()
        seed = given(one)
        into = [tuple(np.zeros_like(each) for each in pair) for pair in cache(seed)]
        transfer = client.start_fetch_prefix(SPEC, tokens(seed), into=into)
        transfer.wait(10.0)
        assert transfer.good_token_count == COUNT
        assert same(into, cache(seed), COUNT)


def test_hidden_states_come_beside_kv_and_in_its_place(one: Client, two: Client) -> None:
    seed = next(SEEDS)
    give(one, seed, hidden={1: e_of(seed)})
    fetched = two.fetch(SPEC, tokens(seed), hidden_layers=(1,))
    assert (fetched.token_count, fetched.tier) == (COUNT, Tier.REDIS)
    assert same(fetched, cache(seed), COUNT)
    assert (bits(fetched.hidden[1]) == e_of(seed)).all()
    kept = [e_of(seed + layer, KEEPS_E.hidden_size) for layer in range(KEEPS_E.layer_count)]
    assert one.store(KEEPS_E, tokens(seed), kept).wait(10.0) is Durability.LOCAL
    quiet(one)
    found = two.fetch(KEEPS_E, tokens(seed))
    assert (found.token_count, found.tier) == (COUNT, Tier.REDIS)
    assert all((bits(e) == other).all() for e, other in zip(found, kept, strict=True))


def test_a_part_that_one_tier_lacks_comes_from_the_next(one: Client, two: Client, shared: Shared) -> None:
    """KV is in the objects alone, E in both, and the other node has the first chunk itself."""
    seed = given(one)
    shared.drop_all("redis")
    give(one, seed, hidden={1: e_of(seed)})
    assert two.store(SPEC, tokens(seed, STEP), cache(seed, STEP)).wait(10.0) is Durability.LOCAL
    fetched = two.fetch(SPEC, tokens(seed), hidden_layers=(1,))
    assert (fetched.token_count, fetched.tier) == (COUNT, Tier.S3)
    assert same(fetched, cache(seed), COUNT)
    assert (bits(fetched.hidden[1]) == e_of(seed)).all()


def test_documents_that_another_node_stored_are_found_in_prompts(one: Client, two: Client, shared: Shared) -> None:
    """Two of them, and one that nobody has; the first of them is in the objects alone."""
    seeds = [next(SEEDS) for _ in range(3)]
    for seed in seeds[:2]:
        assert one.store_segment(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
        quiet(one)
        if seed == seeds[0]:
            shared.drop_all("redis")
    prompt = np.concatenate([tokens_of(100, 7), *map(tokens, seeds)])
    runs = [(100 + place * COUNT, 100 + (place + 1) * COUNT) for place in range(3)]
    found = two.lookup(SPEC, prompt, segments=runs).segments
    assert [each.standalone_token_count for each in found] == [COUNT, COUNT, 0]
    assert [{chunk.tier for chunk in each.chunks} for each in found] == [{Tier.S3}, {Tier.REDIS}, {Tier.NONE}]
    for seed in seeds[:2]:
        fetched = two.fetch_segment(SPEC, tokens(seed))
        assert fetched.token_count == COUNT
        assert same(fetched, cache(seed), COUNT)


def test_one_client_holds_what_another_fetches(nodes: Nodes, one: Client, two: Client, shared: Shared) -> None:
    seed, lost = given(one), given(one)
    match = two.lookup(SPEC, tokens(seed), hold=True)
    gone = two.lookup(SPEC, tokens(lost), hold=True)
    assert match.ticket
    assert gone.ticket
    shared.drop_all("redis")
    shared.drop_all("s3")
    with connect(nodes.two.address) as worker:
        with pytest.raises(DataLoss):
            worker.start_fetch(gone.ticket).wait(10.0)
        with pytest.raises(DataLoss):
            worker.start_fetch(match.ticket).wait(10.0)
        give(one, seed)  # the engine has lost it: nobody knows, until it is asked for
    assert get(one, seed) == WHOLE
    seed = given(one)
    match = two.lookup(SPEC, tokens(seed), hold=True, readers=2)
    assert match.ticket
    for address in (nodes.two.socket_address, nodes.two.address):
        with connect(address) as worker:
            into = [tuple(np.zeros_like(each) for each in pair) for pair in cache(seed)]
            worker.start_fetch(match.ticket, into=into).wait(10.0)
            assert same(into, cache(seed), COUNT)
    eventually(lambda: two.stats().sessions.lease_count == 0)


async def test_by_the_async_client(nodes: Nodes, one: Client, shared: Shared) -> None:
    seed = given(one)
    async with await connect_async(nodes.two.socket_address) as client:
        match = await client.lookup(SPEC, tokens(seed))
        assert {each.tier for each in match.chunks} == {Tier.REDIS}
        shared.switches("redis").turn_on(Switch.STALLED)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.fetch(SPEC, tokens(seed))
        shared.turn_off()
        fetched = await client.fetch(SPEC, tokens(seed))
        assert fetched.token_count == COUNT
        assert fetched.tier in (Tier.REDIS, Tier.DRAM), "what the cancelled fetch began may have ended"
        assert same(fetched, cache(seed), COUNT)


def test_what_left_the_node_is_asked_for_and_comes_back(one: Client) -> None:
    """By a client that had seen it there, and one for which the chain begins in the node and goes on elsewhere."""
    seed = given(one)
    eventually(lambda: (one.peek(SPEC, tokens(seed)) or Match(0, ())).prefix_token_count == COUNT)
    flood(one, seed)
    assert one.peek(SPEC, tokens(seed)) is None, "only a call can tell"
    assert places(one, seed) == [Tier.REDIS] * 4
    with one.watch() as events:
        assert get(one, seed) == WHOLE
        chain = chain_digests(tokens(seed), STEP)
        came = [next(each for each in events if each.digest == digest) for digest in chain]
    assert {(each.kind, each.tier) for each in came} == {(EventKind.STORED, Tier.DRAM)}
    flood(one, seed)
    assert one.store(SPEC, tokens(seed, STEP), cache(seed, STEP)).wait(10.0) is Durability.LOCAL
    assert places(one, seed) == [Tier.DRAM, *[Tier.REDIS] * 3]
    assert get(one, seed) == WHOLE


@pytest.mark.parametrize("kill", [False, True], ids=["clean", "killed"])
def test_after_a_restart_it_is_found_again(nodes: Nodes, shared: Shared, kill: bool) -> None:
    with connect(nodes.one.socket_address) as client:
        seed = given(client)
        flood(client, seed)
        near = given(client)
    nodes.one.stop(kill=kill)
    nodes.one.start()
    with connect(nodes.one.socket_address) as client:
        assert places(client, near) == [Tier.NVME] * 4
        assert places(client, seed) == [Tier.REDIS] * 4
        assert get(client, near) == get(client, seed) == WHOLE
