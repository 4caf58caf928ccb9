"""Two nodes, real servers, that share two tiers: what one stored a client of the other gets to the bit, from memory no
more and no less than from elsewhere; and what a shared tier does wrong costs misses, no wrong bytes and no service."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvstore_client import Client, EventKind, Match, Paged, connect, connect_async
from kvstore_ops.status import render
from rich.console import Console

from kvstore.errors import DataLoss, KVStoreError
from kvstore.keys import chain_digests
from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.shared_tiers import CAPACITY_BYTES, KINDS, LOOKUP_S, Shared, SharingSidecar
from tests.e2e.test_nvme import same
from tests.fakes import Switch
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

STEP = 512
COUNT = 4 * STEP
SPEC = small_spec(chunk_tokens=STEP)
KEEPS_E = small_spec(model_id="kept", weights_digest="cd" * 32, chunk_tokens=STEP, hidden_size=24, keeps_e=True)
BOUND_S = 8.0
"""No call of these clients takes longer, whatever the tiers do."""
SEEDS = itertools.count(1)
"""Each scene has contexts of its own."""


class Nodes(NamedTuple):
    shared: Shared
    one: SharingSidecar
    two: SharingSidecar


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    shared = Shared(tmp_path_factory.mktemp("shared"))
    with SharingSidecar(shared) as one, SharingSidecar(shared) as two:
        yield Nodes(shared, one, two)


@pytest.fixture
def shared(nodes: Nodes) -> Iterator[Shared]:
    """Every test leaves the tiers well, and asked by both nodes."""
    yield nodes.shared
    nodes.shared.turn_off()
    for node in (nodes.one, nodes.two):
        with connect(node.socket_address) as client:
            eventually(lambda client=client: {tier.state for tier in client.stats().tiers} == {"up"})  # type: ignore[misc]


@pytest.fixture
def one(nodes: Nodes, shared: Shared) -> Iterator[Client]:
    with connect(nodes.one.socket_address) as client:
        yield client


@pytest.fixture
def two(nodes: Nodes, shared: Shared) -> Iterator[Client]:
    with connect(nodes.two.socket_address) as client:
        yield client


def tokens(seed: int, count: int = COUNT) -> Any:
    return tokens_of(COUNT, seed)[:count]


def cache(seed: int, count: int = COUNT) -> Any:
    return [(k[:, :count], v[:, :count]) for k, v in random_cache(SPEC, COUNT, seed)]


def e_of(seed: int, width: int = SPEC.hidden_size) -> Any:
    return np.random.default_rng(seed).integers(0, 1 << 16, (COUNT, width), dtype=np.uint16)


def quiet(client: Client) -> None:
    """Every tier has what it takes."""
    eventually(lambda: client.stats().backlog_chunk_count == 0)


def give(client: Client, seed: int, count: int = COUNT, **more: Any) -> int:
    """Store, and wait until the shared tiers have it. Returns the seed."""
    assert client.store(SPEC, tokens(seed, count), cache(seed, count), **more).wait(10.0) is Durability.LOCAL
    quiet(client)
    return seed


def given(client: Client, **more: Any) -> int:
    """The seed of a new context that the node and the shared tiers have."""
    return give(client, next(SEEDS), **more)


def places(client: Client, seed: int) -> list[Tier]:
    """Where a lookup says that its leading chunks are."""
    return [each.tier for each in client.lookup(SPEC, tokens(seed)).chunks if each.tier]


def get(client: Client, seed: int) -> tuple[int, MissReason]:
    """How much of a context comes, all of it right, and why no more; within the bound."""
    began_s = time.monotonic()
    fetched = client.fetch(SPEC, tokens(seed))
    assert time.monotonic() - began_s < BOUND_S, "it was waited for"
    assert same(fetched, cache(seed), fetched.token_count)
    return fetched.token_count, fetched.reason


def flood(client: Client, seed: int) -> None:
    """Have the node give a context up for others."""
    for _ in range(40):
        if not {Tier.DRAM, Tier.NVME} & set(places(client, seed)):
            return
        given(client)
    raise AssertionError("it does not go")


WHOLE = (COUNT, MissReason.NONE)


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


@pytest.mark.parametrize("switch", [Switch.CORRUPT, Switch.GARBLED])
def test_what_comes_back_wrong_is_a_miss(one: Client, two: Client, shared: Shared, switch: Switch) -> None:
    seed = given(one)
    for name in KINDS:
        shared.switches(name).turn_on(switch)
    assert get(two, seed) == (0, MissReason.CORRUPT)
    stream = two.fetch_layers(SPEC, tokens(given(one)))
    with pytest.raises(DataLoss):
        list(stream)


def test_what_is_damaged_is_a_shorter_prefix_until_it_is_stored_again(one: Client, two: Client, shared: Shared) -> None:
    seed = next(SEEDS)
    spoil(given_in_steps(one, shared, seed)["redis"][2])
    assert get(two, seed) == (2 * STEP, MissReason.CORRUPT)
    assert two.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    quiet(two)
    flood(two, seed)
    shared.drop_all("s3")
    assert get(two, seed) == WHOLE


def given_in_steps(client: Client, shared: Shared, seed: int) -> dict[str, list[Path]]:
    """Where each chunk of a new context lies, by the tiers' names."""
    found: dict[str, list[Path]] = {name: [] for name in KINDS}
    for count in range(STEP, COUNT + 1, STEP):
        before = {name: set(shared.objects(name)) for name in KINDS}
        give(client, seed, count)
        for name in KINDS:
            found[name] += set(shared.objects(name)) - before[name]
    return found


def spoil(path: Path) -> None:
    """A bit of its last byte flips."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize("plane", ["local", "remote"])
def test_a_hint_that_turns_out_wrong_midway_is_a_shorter_prefix(
    nodes: Nodes, one: Client, shared: Shared, plane: str
) -> None:
    with connect(nodes.two.address if plane == "remote" else nodes.two.socket_address) as client:
        seed, layered = next(SEEDS), next(SEEDS)
        lost = [given_in_steps(one, shared, each) for each in (seed, layered)]
        for each in (seed, layered):
            assert places(client, each) == [Tier.REDIS] * 4
        for each in lost:
            for name in KINDS:
                each[name][2].unlink()
        assert get(client, seed) == (2 * STEP, MissReason.EVICTED)
        assert get(client, seed) == (2 * STEP, MissReason.COLD)
        stream = client.fetch_layers(SPEC, tokens(layered))
        assert stream.token_count == COUNT
        with pytest.raises(DataLoss):
            list(stream)
        assert stream.good_token_count == 2 * STEP
        assert get(client, layered)[0] == 2 * STEP
        eventually(lambda: client.stats().sessions.lease_count == 0)


def test_an_engine_that_drops_everything_costs_misses(one: Client, two: Client, shared: Shared) -> None:
    seed = given(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    shared.drop_all(*KINDS)
    assert get(two, seed) == (0, MissReason.EVICTED)
    assert places(two, seed) == []
    assert get(one, seed) == WHOLE, "the node has its own"
    assert two.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    quiet(two)
    flood(two, seed)
    assert get(two, seed) == WHOLE


def test_hints_that_lie_cost_a_read(one: Client, two: Client, shared: Shared) -> None:
    seed, nowhere = given(one), next(SEEDS)
    for name in KINDS:
        shared.switches(name).turn_on(Switch.LYING)
    assert get(two, seed) == (0, MissReason.COLD)
    for kind in KINDS.values():
        assert places(two, nowhere) == [kind] * 4
        assert get(two, nowhere) == (0, MissReason.EVICTED)
    assert places(two, nowhere) == []


def test_while_tiers_stall_clients_have_their_answers(one: Client, two: Client, shared: Shared) -> None:
    seed, fresh = given(one), next(SEEDS)
    assert places(two, seed) == [Tier.REDIS] * 4
    for name in KINDS:
        shared.switches(name).turn_on(Switch.STALLED)
    assert get(two, seed) == (0, MissReason.UNAVAILABLE)
    assert two.store(SPEC, tokens(fresh), cache(fresh)).wait(10.0) is Durability.LOCAL
    assert get(two, fresh) == WHOLE
    began_s = time.monotonic()
    assert places(two, next(SEEDS)) == []
    assert time.monotonic() - began_s < BOUND_S
    eventually(lambda: [tier.state for tier in two.stats().tiers] == ["up", "failing", "failing"])
    transfer = two.start_fetch_prefix(SPEC, tokens(fresh))
    assert transfer.cancel(BOUND_S)
    shared.turn_off()
    eventually(lambda: get(two, seed) == WHOLE, 10.0)
    eventually(lambda: two.stats().loading_bytes == 0)


def test_a_client_in_a_hurry_gets_what_the_node_has(nodes: Nodes, one: Client, two: Client, shared: Shared) -> None:
    """It waits for less than lookups may wait for a shared tier."""
    seed = given(one)
    assert two.store(SPEC, tokens(seed, STEP), cache(seed, STEP)).wait(10.0) is Durability.LOCAL
    shared.switches("redis").turn_on(Switch.STALLED)
    for address in (nodes.two.socket_address, nodes.two.address):
        with connect(address, timeout_s=LOOKUP_S / 2) as client:
            assert get(client, seed)[0] == STEP
            assert places(client, seed) == [Tier.DRAM]


def drawn(stats: Any) -> str:
    """As ``kvstore status`` has it."""
    page = io.StringIO()
    Console(file=page).print(render(stats))
    return page.getvalue()


def metrics(node: SharingSidecar) -> str:
    log = [json.loads(line) for line in (node.directory / "log").read_text().splitlines()]
    url = [line["metrics"] for line in log if line["message"] == "ready"][-1]
    with urllib.request.urlopen(url, timeout=10) as page:
        return str(page.read().decode())


def page_of(node: SharingSidecar, name: str) -> dict[str, float]:
    """What the metrics page says of each tier."""
    rows = re.findall(rf'^kvstore_{name}\{{tier="(\w+)"\}} (\S+)$', metrics(node), re.MULTILINE)
    return {tier: float(value) for tier, value in rows}


def test_an_outage_is_gone_without_and_ends_by_itself(nodes: Nodes, one: Client, two: Client, shared: Shared) -> None:
    seed, fresh = given(one), next(SEEDS)
    for name in KINDS:
        shared.switches(name).turn_on(Switch.AWAY)
    for _ in range(4):
        assert places(two, next(SEEDS)) == []
    assert get(two, seed)[0] == 0
    assert two.store(SPEC, tokens(fresh), cache(fresh)).wait(10.0) is Durability.LOCAL
    assert get(two, fresh) == WHOLE
    stats = two.stats()
    assert [tier.state for tier in stats.tiers] == ["up", "failing", "failing"]
    assert "redis (failing, shared)" in drawn(stats)
    assert page_of(nodes.two, "tier_up") == {"nvme": 1.0, "redis": 0.0, "s3": 0.0}
    assert "tiers.redis: no answer" in stats.tier_problem
    shared.turn_off()
    eventually(lambda: get(two, seed) == WHOLE, 10.0)
    eventually(lambda: [tier.state for tier in two.stats().tiers] == ["up"] * 3, 10.0)
    eventually(lambda: places(one, fresh) == [Tier.REDIS] * 4, 20.0)
    assert two.stats().tier_problem == ""


def test_while_an_engine_is_full_stores_reach_the_node(one: Client, two: Client, shared: Shared) -> None:
    for name in KINDS:
        full = shared.settings(name).directory / "full"
        full.touch()
        os.truncate(full, CAPACITY_BYTES)
    seed = next(SEEDS)
    assert one.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.LOCAL
    eventually(lambda: one.stats().counters["s3_refused_chunks"] >= 4)
    assert "tiers.s3: the engine of tiers.s3 is full" in one.stats().tier_problem
    assert get(one, seed) == WHOLE
    assert places(two, seed) == []
    for name in KINDS:
        (shared.settings(name).directory / "full").unlink()


def test_a_store_of_what_others_have_is_joined_and_goes_on(one: Client, two: Client) -> None:
    """Partial chunks and what follows the hinted chunks are the node's own."""
    seed = next(SEEDS)
    give(one, seed, 2 * STEP)
    writer = two.start_store(SPEC, tokens(seed))
    into = [tuple(np.zeros_like(each) for each in pair) for pair in cache(seed)]
    transfer = two.start_fetch(writer.ticket, into=into)
    for layer, pair in enumerate(cache(seed)):
        writer.put_layer(layer, pair)
    assert writer.commit().wait(10.0) is Durability.LOCAL
    transfer.wait(10.0)
    assert same(into, cache(seed), COUNT)
    seed = next(SEEDS)
    give(one, seed, 2 * STEP)
    assert get(two, seed)[0] == 2 * STEP
    count = 2 * STEP + 100
    assert two.store(SPEC, tokens(seed, count), cache(seed, count)).wait(10.0) is Durability.LOCAL
    assert two.lookup(SPEC, tokens(seed)).prefix_token_count == count
    assert get(two, seed)[0] == count
    assert get(one, seed)[0] == 2 * STEP, "partial chunks stay on their node"


def test_a_fetch_that_is_given_up_leaves_nothing(one: Client, two: Client, shared: Shared) -> None:
    seed = given(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    shared.switches("redis").turn_on(Switch.STALLED)
    transfer = two.start_fetch_prefix(SPEC, tokens(seed))
    began_s = time.monotonic()
    assert transfer.cancel(BOUND_S)
    assert time.monotonic() - began_s < BOUND_S
    with pytest.raises(KVStoreError):
        transfer.wait(1.0)
    shared.turn_off()
    eventually(lambda: (two.stats().sessions.lease_count, two.stats().loading_bytes) == (0, 0))
    eventually(lambda: get(two, seed) == WHOLE, 10.0)


def test_operators_see_their_rows(nodes: Nodes, one: Client, shared: Shared) -> None:
    given(one)
    stats = one.stats()
    assert [(tier.name, tier.state) for tier in stats.tiers] == [("nvme", "up"), ("redis", "up"), ("s3", "up")]
    assert stats.tier_problem == ""
    redis = stats.tiers[1]
    eventually(lambda: one.stats().tiers[1].chunk_count == len(shared.objects("redis")))
    assert [tier.is_shared for tier in stats.tiers] == [False, True, True]
    assert f"in {redis.chunk_count:,} chunks" in drawn(stats)
    assert page_of(nodes.one, "tier_chunk_count")["redis"] > 0
    assert page_of(nodes.one, "tier_up") == {"nvme": 1.0, "redis": 1.0, "s3": 1.0}
    for name in ("written_chunks", "refused_chunks", "asked_chunks", "late_answers"):
        assert f"kvstore_redis_{name}_total" in metrics(nodes.one)
