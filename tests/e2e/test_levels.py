"""Receipts tell which levels were reached and why not the others, by every plane and client; what they say is there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvstore_client import Client, Durability, Receipt, connect, connect_async
from kvstore_client.prompt import Prompt
from kvstore_client.store.store import reported

from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.spec import LEVELS, Tier
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.shared_tiers import Shared, SharingSidecar
from tests.e2e.test_nvme import same
from tests.fakes import Switch
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
SPEC = small_spec(chunk_tokens=STEP)
COUNT = 3 * STEP
MEMORY, LOCAL, SHARED, OBJECT = LEVELS
SEEDS = itertools.count(1)
WAIT_S = 10.0


class Nodes(NamedTuple):
    """Nothing goes to the objects by itself."""

    shared: Shared
    one: SharingSidecar
    two: SharingSidecar

    def address(self, plane: str) -> str:
        return self.one.address if plane == "remote" else self.one.socket_address


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    shared = Shared(tmp_path_factory.mktemp("shared"), redis="never", s3="never")
    with SharingSidecar(shared) as one, SharingSidecar(shared) as two:
        yield Nodes(shared, one, two)


@pytest.fixture(params=["local", "remote"])
def client(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[Client]:
    with connect(nodes.address(request.param)) as client:
        assert client.plane == request.param
        yield client
    nodes.shared.turn_off()


def context(count: int = COUNT) -> tuple[Any, Any]:
    """A new one: its tokens and its cache."""
    seed = next(SEEDS)
    return tokens_of(COUNT, seed)[:count], [(k[:, :count], v[:, :count]) for k, v in random_cache(SPEC, COUNT, seed)]


def there(nodes: Nodes, name: str) -> int:
    """How many chunks a shared tier has."""
    return len(nodes.shared.objects(name))


def test_a_receipt_tells_of_every_level(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    receipt = client.store(SPEC, tokens, kv)
    assert receipt.wait(WAIT_S) is LOCAL
    assert (receipt.reached, receipt.reason) == ({MEMORY, LOCAL}, "")
    assert set(receipt.missing) == {SHARED, OBJECT}
    assert "tiers.redis.write = never" in receipt.missing[SHARED]
    assert "tiers.s3.write = never" in receipt.missing[OBJECT]


@pytest.mark.parametrize(("level", "name"), [(SHARED, "redis"), (OBJECT, "s3")])
def test_a_store_that_asks_for_a_level_is_there_when_it_is_said(
    nodes: Nodes, client: Client, level: Durability, name: str
) -> None:
    tokens, kv = context()
    before = there(nodes, name)
    receipt = client.store(SPEC, tokens, kv, durability=level)
    assert receipt.wait(WAIT_S) is level
    assert {MEMORY, level} <= receipt.reached
    assert receipt.reached | receipt.missing.keys() == set(LEVELS)
    assert there(nodes, name) == before + 3
    with connect(nodes.two.socket_address) as other:
        fetched = other.fetch(SPEC, tokens)
        assert (fetched.token_count, fetched.tier) == (COUNT, Tier.REDIS if level is SHARED else Tier.S3)
        assert same(fetched, kv, COUNT)
    assert client.store(SPEC, tokens, kv, durability=level).wait(WAIT_S) is level, "and again"


def test_the_end_of_a_conversation_takes_its_beginning_along(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    first = [(k[:, :STEP], v[:, :STEP]) for k, v in kv]
    assert client.store(SPEC, tokens[:STEP], first).wait(WAIT_S) is LOCAL
    before = there(nodes, "s3")
    assert client.store(SPEC, tokens, kv, durability=OBJECT).wait(WAIT_S) is OBJECT
    assert there(nodes, "s3") == before + 3


def test_levels_beyond_the_node_count_whole_chunks(nodes: Nodes, client: Client) -> None:
    tokens, kv = context(COUNT - 100)
    before = there(nodes, "s3")
    assert client.store(SPEC, tokens, kv, durability=OBJECT).wait(WAIT_S) is OBJECT
    assert there(nodes, "s3") == before + 2
    tokens, kv = context(100)
    receipt = client.store(SPEC, tokens, kv, durability=OBJECT)
    assert receipt.wait(WAIT_S) is LOCAL
    assert "partial" in receipt.reason
    assert receipt.reason == receipt.missing[OBJECT]


def test_hidden_states_are_part_of_it(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    e = np.random.default_rng(1).integers(0, 1 << 16, (COUNT, SPEC.hidden_size), dtype=np.uint16)
    before = there(nodes, "s3")
    assert client.store(SPEC, tokens, kv, hidden={1: e}, durability=OBJECT).wait(WAIT_S) is OBJECT
    assert there(nodes, "s3") == before + 6


def test_writers_that_store_together_ask_each_for_its_level(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    writer = client.start_store(SPEC, tokens, shards=2, durability=SHARED)
    other = client.join_store(writer.ticket, 1, durability=OBJECT)
    receipts: list[Receipt] = []
    for shard, each in enumerate((writer, other)):
        for layer, (k, v) in enumerate(kv):
            heads = range(shard, shard + 1)
            each.put_layer(layer, (k[shard : shard + 1], v[shard : shard + 1]), heads=heads)
        receipts.append(each.commit())
    assert [each.wait(WAIT_S) for each in receipts] == [SHARED, OBJECT]


def test_memory_alone_asks_nobody(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    receipt = client.store(SPEC, tokens, kv, durability=MEMORY)
    assert receipt.wait(WAIT_S) is MEMORY
    assert receipt.reached == {MEMORY}
    assert "nobody asked" in receipt.missing[LOCAL]


def test_values_stay_on_their_node(nodes: Nodes, client: Client) -> None:
    for level in (SHARED, OBJECT):
        with pytest.raises(InvalidRequest, match="values stay on their node"):
            client.put_bytes("values", "key", b"value", durability=level)
    receipt = client.put_bytes("values", "key", b"value")
    assert receipt.wait(WAIT_S) is LOCAL
    assert "stay on their node" in receipt.missing[OBJECT]


def test_a_tier_that_stalls_delays_its_own_level_only_and_no_longer_than_the_timeout(
    nodes: Nodes, client: Client
) -> None:
    tokens, kv = context()
    nodes.shared.switches("s3").turn_on(Switch.STALLED)
    receipt = client.store(SPEC, tokens, kv, durability=OBJECT)
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="OBJECT"):
        receipt.wait(1.0)
    assert time.monotonic() - began_s < 5.0
    assert {MEMORY, LOCAL} <= receipt.reached
    assert receipt.missing[OBJECT]
    tokens, kv = context()
    assert client.store(SPEC, tokens, kv, durability=SHARED).wait(WAIT_S) is SHARED
    nodes.shared.turn_off()
    assert receipt.wait(40.0) in (OBJECT, LOCAL)
    assert client.store(SPEC, tokens, kv, durability=OBJECT).wait(40.0) in (OBJECT, SHARED)


async def test_by_the_async_client(nodes: Nodes) -> None:
    tokens, kv = context()
    async with await connect_async(nodes.one.socket_address) as client:
        receipt = await client.store(SPEC, tokens, kv, durability=OBJECT)
        assert await client.wait(receipt, WAIT_S) is OBJECT
        assert {MEMORY, OBJECT} <= receipt.reached


def test_a_number_that_is_no_level_is_refused(nodes: Nodes, client: Client) -> None:
    tokens, kv = context()
    for level in (Durability.NONE, 7):
        with pytest.raises(InvalidRequest, match="MEMORY, LOCAL, SHARED, OBJECT"):
            client.store(SPEC, tokens, kv, durability=level)


def test_a_sidecar_of_an_earlier_release_is_believed_of_the_nodes_own_levels() -> None:
    said = pb.StoreResponse(durability=pb.DURABILITY_LOCAL, is_settled=True)
    assert reported(said).keys() == {SHARED, OBJECT}
    said = pb.StoreResponse(durability=pb.DURABILITY_MEMORY, refusal="the device is full", is_settled=True)
    assert reported(said) == dict.fromkeys((LOCAL, SHARED, OBJECT), "the device is full")


def test_a_client_of_an_earlier_release_hears_of_the_nodes_own_level(nodes: Nodes) -> None:
    """Its enum is an order: what is beyond the node would count as more than the device."""
    tokens, kv = context()
    prompt = Prompt.of(SPEC, tokens, (), None)
    with connect(nodes.one.socket_address) as client:
        assert client.store(SPEC, tokens, kv, durability=OBJECT).wait(WAIT_S) is OBJECT
        assert client.store(SPEC, tokens, kv).wait(WAIT_S) is LOCAL
        session, name = client._context.ready(SPEC)
        asked = pb.Settle(query=prompt.query(name, prompt.digests, ()), timeout_seconds=WAIT_S)
        reply = session.call(session.cache.Store, pb.StoreRequest(settle=asked), WAIT_S)
        assert (reply.durability, reply.refusal, reply.is_settled) == (pb.DURABILITY_LOCAL, "", True)
        assert {each.durability for each in reply.levels if each.is_reached} == {MEMORY, LOCAL, OBJECT}
