"""Two real sidecars over one real Redis and one real S3 server: a prompt that lies in parts in every tier comes whole
and to the bit, what a killed node computed another one goes on with, and nothing is mixed up on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_client import Client, Exactness, connect
from kvstore_client.engines.transformers import CachedModel

from kvstore.errors import DataLoss
from kvstore.spec import Durability, MissReason, ModelSpec, Tier
from tests.e2e.test_nvme import same
from tests.e2e.two_nodes import Cluster, TieredNode, flood, quiet, two_nodes
from tests.recompute.models import VOCABULARY, model_of
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

pytestmark = [pytest.mark.redis, pytest.mark.s3]
STEP = 512
COUNT = 8 * STEP
CHUNK_BYTES = 64 << 10
SPEC = small_spec(chunk_tokens=STEP)
MODEL_STEP = 32
PLANES = ("local", "remote")
SEEDS = itertools.count(1)
"""Each scene has contexts of its own."""
BACK_S = 20.0
SPREAD = [Tier.DRAM] * 2 + [Tier.NVME] * 2 + [Tier.REDIS] * 2 + [Tier.S3] * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def doomed(cluster: Cluster) -> Iterator[TieredNode]:
    """A third node, which the last test that uses it kills."""
    with TieredNode("doomed", cluster.redis, cluster.s3) as node:
        yield node


@pytest.fixture
def a(cluster: Cluster) -> Iterator[Client]:
    with connect(cluster.a.socket_address) as client:
        yield client


@pytest.fixture
def b(cluster: Cluster) -> Iterator[Client]:
    with connect(cluster.b.socket_address) as client:
        yield client


def tokens(seed: int, count: int = COUNT) -> Any:
    return tokens_of(COUNT, seed)[:count]


def cache(seed: int, count: int = COUNT) -> Any:
    return [(k[:, :count], v[:, :count]) for k, v in random_cache(SPEC, COUNT, seed)]


def give(client: Client, seed: int, count: int = COUNT, **more: Any) -> int:
    """Store, and wait until every tier has it. Returns the seed."""
    assert client.store(SPEC, tokens(seed, count), cache(seed, count), **more).wait(10.0) is not Durability.NONE
    quiet(client)
    return seed


def places(client: Client, seed: int) -> list[Tier]:
    """Where a lookup says that each chunk is."""
    return [each.tier for each in client.lookup(SPEC, tokens(seed)).chunks]


def are_new(names: Callable[[], Any], before: set[str], count: int) -> bool:
    """At least so many: a node may send what it has of others, too."""
    return len(set(names()) - before) >= count


def new_names(names: Callable[[], Any], client: Client, seed: int, *counts: int) -> list[set[str]]:
    """Store so many leading tokens, then more: the storage keys that each step adds."""
    found: list[set[str]] = []
    size = 0
    for count in counts:
        before = set(names())
        give(client, seed, count)
        eventually(partial(are_new, names, before, (count - size) // STEP), 30.0)  # one that was late is sent again
        found.append(set(names()) - before)
        size = count
    return found


# ---------------------------------------------------------------- one prompt in every tier


def spread(cluster: Cluster, a: Client, b: Client, *seeds: int) -> None:
    """Two chunks of each prompt in B's memory, two on its device only, two in Redis only and two in S3 only."""
    for seed in seeds:
        near, redis, s3 = new_names(cluster.in_redis, a, seed, 4 * STEP, 6 * STEP, 8 * STEP)
        cluster.drop(*near)
        cluster.drop(*redis, redis=False)
        cluster.drop(*s3, s3=False)
        give(b, seed, 4 * STEP)
        cluster.drop(*near)
    flood(b)
    for seed in seeds:
        assert b.fetch(SPEC, tokens(seed, 2 * STEP)).tier is Tier.NVME


@pytest.mark.parametrize("plane", PLANES)
def test_a_prompt_that_lies_in_parts_in_every_tier_comes_whole(
    cluster: Cluster, a: Client, b: Client, plane: str
) -> None:
    at_once, by_layers = next(SEEDS), next(SEEDS)
    spread(cluster, a, b, at_once, by_layers)
    with connect(cluster.b.address if plane == "remote" else cluster.b.socket_address) as client:
        assert client.plane == plane
        match = client.lookup(SPEC, np.append(tokens(at_once), [1, 2, 3]))
        assert match.prefix_token_count == COUNT
        assert [each.tier for each in match.chunks] == [*SPREAD, Tier.NONE]
        fetched = client.fetch(SPEC, tokens(at_once), verify=True)
        assert (fetched.token_count, fetched.tier, fetched.reason) == (COUNT, Tier.S3, MissReason.NONE)
        assert same(fetched, cache(at_once), COUNT)
        assert places(client, by_layers) == SPREAD
        stream = client.fetch_layers(SPEC, tokens(by_layers), verify=True)
        assert stream.token_count == COUNT
        layers = dict(stream)
        assert same([layers[0], layers[1]], cache(by_layers), COUNT)


# ---------------------------------------------------------------- a herd


def test_a_herd_sends_each_chunk_once_and_reads_it_once(cluster: Cluster, a: Client, b: Client) -> None:
    seed, names = next(SEEDS), [f"{tier}_{what}_chunks" for tier in ("redis", "s3") for what in ("written", "present")]
    give(a, seed)
    before, there = b.stats().counters, (set(cluster.in_redis()), set(cluster.in_s3()))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: b.store(SPEC, tokens(seed), cache(seed)).wait(10.0), range(8)))
    quiet(b)
    assert [b.stats().counters[name] - before[name] for name in names] == [0, 8, 0, 8]
    assert (set(cluster.in_redis()), set(cluster.in_s3())) == there
    give(a, seed := next(SEEDS))
    before_bytes = b.stats().tiers[1].read_bytes
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: b.fetch(SPEC, tokens(seed)), range(8)))
    assert all(same(each, cache(seed), COUNT) for each in found)
    read_bytes = b.stats().tiers[1].read_bytes - before_bytes
    assert 8 * CHUNK_BYTES <= read_bytes < 9 * CHUNK_BYTES


def test_nodes_that_store_the_same_at_once_leave_one_copy_of_it(
    cluster: Cluster, doomed: TieredNode, a: Client, b: Client
) -> None:
    """Each leaves to the other what that one is sending."""
    seed, there = next(SEEDS), (set(cluster.in_redis()), set(cluster.in_s3()))
    with connect(doomed.socket_address) as c:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda client: client.store(SPEC, tokens(seed), cache(seed)).wait(10.0), [a, c] * 4))
        quiet(a)
        quiet(c)
    names = (set(cluster.in_redis()) - there[0]) & (set(cluster.in_s3()) - there[1])
    assert len(names) == 8
    cluster.drop(*sorted(names)[:4], s3=False)
    fetched = b.fetch(SPEC, tokens(seed), verify=True)
    assert fetched.token_count == COUNT
    assert same(fetched, cache(seed), COUNT)


# ---------------------------------------------------------------- an engine on each node


def asked(model: Any, client: Client, ids: Any, durability: Durability | None = None, *, keeps_e: bool = False) -> Any:
    """Logits and tokens of an answer, and the report, of an engine that has just started."""
    spec = ModelSpec.from_transformers(model.config, model, MODEL_STEP, keeps_e=keeps_e)
    cached = CachedModel(model, client, spec=spec, durability=durability)
    output = cached.generate(ids, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True)
    return torch.stack(output.sequences.logits), output.sequences.sequences, output.report


def test_what_a_killed_nodes_engine_computed_another_goes_on_with(
    cluster: Cluster, doomed: TieredNode, b: Client
) -> None:
    """KV, and E in its place; from Redis, and once that is dead, too, from S3."""
    model = model_of("llama-biased-mha", 11)
    scenes = [(tier, keeps_e, next(SEEDS)) for tier in (Tier.REDIS, Tier.S3) for keeps_e in (False, True)]
    prompts = {seed: tokens_of(4 * MODEL_STEP + 7, seed, VOCABULARY).astype(np.int64)[None] for _, _, seed in scenes}
    computed = {}
    with connect(doomed.socket_address) as client:
        for _, keeps_e, seed in scenes:
            ids = torch.from_numpy(prompts[seed])
            logits, _, report = asked(model, client, ids, Durability.OBJECT, keeps_e=keeps_e)
            assert (report.reused_token_count, report.wait_stored(20.0)) == (0, Durability.OBJECT)
            computed[seed] = logits
        quiet(client)
        doomed.stop(kill=True)
    try:
        for tier, keeps_e, seed in scenes:
            if tier is Tier.S3:
                cluster.redis.kill()
            ids = torch.from_numpy(prompts[seed])
            logits, answer, report = asked(model, b, ids, keeps_e=keeps_e)
            assert (report.reused_token_count, report.tier) == (4 * MODEL_STEP, tier)
            assert torch.equal(logits, computed[seed])
            assert torch.equal(answer, model.generate(ids, max_new_tokens=5, do_sample=False))
    finally:
        cluster.redis.kill()
        cluster.redis.start()
    for node in (cluster.a, cluster.b):
        with connect(node.socket_address) as client:
            eventually(lambda client=client: {each.state for each in client.stats().tiers} == {"up"}, BACK_S)


def test_hidden_states_beside_kv_come_from_redis_and_s3(cluster: Cluster, a: Client, b: Client) -> None:
    for redis in (True, False):
        seed = next(SEEDS)
        e = np.random.default_rng(seed).integers(0, 1 << 16, (COUNT, SPEC.hidden_size), dtype=np.uint16)
        before = set(cluster.in_redis())
        give(a, seed, hidden={1: e})
        names = set(cluster.in_redis()) - before
        assert len(names) >= 16  # what a node sends of others may come late
        cluster.drop(*names, redis=not redis, s3=redis)
        fetched = b.fetch(SPEC, tokens(seed), hidden_layers=(1,), verify=True)
        assert (fetched.token_count, fetched.tier) == (COUNT, Tier.REDIS if redis else Tier.S3)
        assert same(fetched, cache(seed), COUNT)
        assert (bits(fetched.hidden[1]) == e).all()


# ---------------------------------------------------------------- tickets


def test_a_ticket_holds_what_the_node_has_and_says_of_the_rest_where_it_is(
    cluster: Cluster, a: Client, b: Client
) -> None:
    """Of what only a shared tier has it pins nothing: that may go, and then the fetch says so."""
    seed = next(SEEDS)
    near, far = new_names(cluster.in_redis, a, seed, 2 * STEP, 4 * STEP)
    give(b, seed, 2 * STEP)
    held_bytes = b.stats().sessions.ticket_bytes
    match = b.lookup(SPEC, tokens(seed, 4 * STEP), hold=True, readers=2)
    assert match.ticket
    assert [each.tier for each in match.chunks] == [Tier.DRAM] * 2 + [Tier.REDIS] * 2
    held_bytes = b.stats().sessions.ticket_bytes - held_bytes
    assert 2 * CHUNK_BYTES <= held_bytes < 3 * CHUNK_BYTES
    cluster.drop(*near, *far)
    flood(b)
    assert places(b, seed)[:2] == [Tier.DRAM] * 2, "these are held"
    with pytest.raises(DataLoss):
        b.start_fetch(match.ticket).wait(10.0)
    give(a, seed := next(SEEDS), 4 * STEP)
    match = b.lookup(SPEC, tokens(seed, 4 * STEP), hold=True)
    assert match.ticket
    into = [tuple(np.zeros_like(each) for each in pair) for pair in cache(seed, 4 * STEP)]
    b.start_fetch(match.ticket, into=into).wait(10.0)
    assert same(into, cache(seed), 4 * STEP)
    b.release_ticket(match.ticket)


# ---------------------------------------------------------------- exact and derived


def test_derived_and_exact_caches_of_one_prompt_are_never_mixed(cluster: Cluster, a: Client, b: Client) -> None:
    seed, other = next(SEEDS), next(SEEDS)
    kv = {Exactness.EXACT: cache(seed), Exactness.DERIVED: cache(other)}
    for client, exactness in ((a, Exactness.EXACT), (b, Exactness.DERIVED)):
        client.store(SPEC, tokens(seed), kv[exactness], exactness=exactness).wait(10.0)
        quiet(client)
    for client, exactness in itertools.product((a, b), Exactness):
        fetched = client.fetch(SPEC, tokens(seed), exactness=exactness, verify=True)
        assert (fetched.token_count, fetched.exactness) == (COUNT, exactness)
        assert same(fetched, kv[exactness], COUNT)
    seed = next(SEEDS)
    b.store(SPEC, tokens(seed), cache(other), exactness=Exactness.DERIVED).wait(10.0)
    quiet(b)
    assert a.fetch(SPEC, tokens(seed)).token_count == 0
    assert a.fetch(SPEC, tokens(seed), exactness=Exactness.DERIVED).token_count == COUNT
