"""More models than a sidecar registers at once: it forgets those that nothing needs, and clients notice nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from kvstore_client import Client, connect, connect_async
from kvstore_client.loading.call import Asked
from kvstore_client.planes import session as session_room
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.top.sample import Sample

from kvstore.errors import UNREGISTERED, Exhausted
from kvstore.keys import fingerprint
from kvstore.planning.loading import Way
from kvstore.spec import Durability, Exactness, ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2
from kvstore.wire import unpack_fields
from tests.ops.command import run
from tests.server.raw import Raw, eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

LIMIT, COUNT = 2, 40
SPECS = [small_spec(model_id=f"m{number}") for number in range(5)]
CACHE, TOKENS = random_cache(SPECS[0], COUNT), tokens_of(COUNT)
ENVIRONMENT = {**os.environ, "KVSTORE__LIMITS__MODEL_COUNT_MAX": str(LIMIT)}


@pytest.fixture(scope="module")
def sidecar(plane: str) -> Iterator[Sidecar]:
    with Sidecar("--capacity", "16 MiB", environment=ENVIRONMENT, plane=plane) as running:
        yield running


@pytest.fixture
def clients(sidecar: Sidecar) -> Iterator[list[Client]]:
    """Two that stay connected. To the second one the presence table tells nothing: each lookup and fetch is a call."""
    with connect(sidecar.address) as one, connect(sidecar.address, planning="on") as other:
        presence: Any = other.connect_now().presence
        if presence is not None:
            presence.look_up = presence.holds = lambda *_: None
        yield [one, other]
        for spec in SPECS:
            evict(sidecar, spec)


def evict(sidecar: Sidecar, spec: ModelSpec) -> None:
    """All chunks of a model leave the node."""
    run("evict", "--model", spec.model_id, "--yes", "--socket", sidecar.socket_address.removeprefix("unix://"))


def store(client: Client, spec: ModelSpec, tokens: Any = TOKENS) -> int:
    return client.store(spec, tokens, CACHE, durability=Durability.MEMORY).wait(10.0)


def planned(client: Client, spec: ModelSpec) -> int:
    call = client.planner.begin(
        Prompt.of(spec, TOKENS, (), Exactness.EXACT), Asked(COUNT, 16, (Way.PREFILL,), mode="on")
    )
    assert call is not None
    call.close()
    return int(call.answer.found.hit_count)


def begun_and_dropped(client: Client, spec: ModelSpec) -> int:
    with client.start_store(spec, TOKENS) as writer:
        return 0 if writer.wanted_token_count == COUNT else 1


CALLS: dict[str, Callable[[Client, ModelSpec], object]] = {
    "lookup": lambda client, spec: client.lookup(spec, TOKENS).prefix_token_count,
    "held": lambda client, spec: client.lookup(spec, TOKENS, hold=True).ticket or 0,
    "segments": lambda client, spec: client.lookup(spec, TOKENS, segments=[(0, COUNT)]).prefix_token_count,
    "fetch": lambda client, spec: client.fetch(spec, TOKENS, hidden_layers=(1,)).token_count,
    "layers": lambda client, spec: len(list(client.fetch_layers(spec, TOKENS))),
    "transfer": lambda client, spec: client.start_fetch_prefix(spec, TOKENS).token_count,
    "document": lambda client, spec: client.fetch_segment(spec, TOKENS).token_count,
    "plan": planned,
    "values": lambda client, spec: int(client.get_bytes(spec.model_id, "key") is not None),
    "exists": lambda client, spec: int(client.exists(spec.model_id, "key")),
    "writer": begun_and_dropped,
}


@pytest.mark.parametrize("name", CALLS)
def test_in_turns_every_call_works_and_no_client_connects_again(clients: list[Client], name: str) -> None:
    for _ in range(2):
        for spec in SPECS:
            for client in clients:
                assert CALLS[name](client, spec) == 0
    assert len(clients[0].stats().models) <= LIMIT
    assert [client.statistics()["sessions"] for client in clients] == [1, 1]
    assert [client.statistics()["unavailable"] for client in clients] == [0, 0]


def test_models_with_chunks_stay_and_without_them_they_go(sidecar: Sidecar, clients: list[Client]) -> None:
    client, other = clients
    for spec in SPECS[:LIMIT]:
        assert store(client, spec) == Durability.MEMORY
    receipt = other.store(SPECS[2], TOKENS, CACHE)
    assert receipt.wait(10.0) is Durability.NONE
    assert "all of them are in use" in receipt.reason
    assert "limits.model_count_max" in receipt.reason
    with pytest.raises(Exhausted, match=r"limits\.model_count_max"):
        other.lookup(SPECS[2], TOKENS)
    for spec in SPECS[:LIMIT]:
        assert other.fetch(spec, TOKENS).token_count == COUNT
    evict(sidecar, SPECS[0])
    assert store(other, SPECS[2]) == Durability.MEMORY
    assert {each.model_id for each in client.stats().models} == {SPECS[1].model_id, SPECS[2].model_id}
    for each in clients:
        assert [each.fetch(spec, TOKENS).token_count for spec in SPECS[1:3]] == [COUNT, COUNT]


def test_in_the_place_of_a_forgotten_model_nothing_of_it_is_found(sidecar: Sidecar, clients: list[Client]) -> None:
    """The same tokens under the same number, by clients that fetched the old ones without a call."""
    client, other = clients
    old, new = SPECS[0], SPECS[1]
    for each in (old, new) * 3:
        assert [one.fetch(each, TOKENS).token_count for one in clients] == [0, 0]
        assert store(client, each) == Durability.MEMORY
        for one in clients * 2:
            (k, v), *_ = one.fetch(each, TOKENS)
            assert (bits(k) == CACHE[0][0]).all()
            assert (bits(v) == CACHE[0][1]).all()
        evict(sidecar, each)
        for spec in SPECS[2 : 2 + LIMIT]:
            assert other.lookup(spec, TOKENS).prefix_token_count == 0
        assert [one.lookup(each, TOKENS).prefix_token_count for one in clients] == [0, 0]


def test_what_fetches_brought_of_a_forgotten_model_still_counts(sidecar: Sidecar, clients: list[Client]) -> None:
    client, other = clients

    def served() -> int:
        return Sample(0.0, client.stats(), admin_pb2.TiersResponse()).served_tokens

    assert store(client, SPECS[0]) == Durability.MEMORY
    before = served()
    assert other.fetch(SPECS[0], TOKENS).token_count == COUNT
    eventually(lambda: served() == before + COUNT)
    evict(sidecar, SPECS[0])
    for spec in SPECS[1 : 1 + LIMIT]:
        assert other.lookup(spec, TOKENS).prefix_token_count == 0
    assert SPECS[0].model_id not in {each.model_id for each in client.stats().models}
    assert served() == before + COUNT


def test_a_model_stays_while_a_ticket_or_a_store_needs_it(sidecar: Sidecar, clients: list[Client]) -> None:
    client, other = clients
    assert store(client, SPECS[0]) == Durability.MEMORY
    ticket = client.lookup(SPECS[0], TOKENS, hold=True).ticket
    writer = client.start_store(SPECS[1], TOKENS)
    evict(sidecar, SPECS[0])
    with pytest.raises(Exhausted):
        other.lookup(SPECS[2], TOKENS)
    assert ticket is not None
    assert client.start_fetch(ticket).token_count == COUNT
    for layer, pair in enumerate(CACHE):
        writer.put_layer(layer, pair)
    assert writer.commit().wait(10.0) is Durability.MEMORY
    assert other.fetch(SPECS[1], TOKENS).token_count == COUNT
    client.release_ticket(ticket)

    def takes_its_place() -> bool:
        evict(sidecar, SPECS[0])
        try:
            return other.lookup(SPECS[2], TOKENS).prefix_token_count == 0
        except Exhausted:  # the lease is on its way back
            return False

    eventually(takes_its_place)


def test_a_receipt_of_a_forgotten_model_says_that_its_chunks_are_gone(sidecar: Sidecar, clients: list[Client]) -> None:
    client, other = clients
    receipt = client.store(SPECS[0], TOKENS, CACHE)
    eventually(lambda: receipt.stored_token_count == COUNT)
    evict(sidecar, SPECS[0])
    for spec in SPECS[1 : 1 + LIMIT]:
        assert other.lookup(spec, TOKENS).prefix_token_count == 0
    assert SPECS[0].model_id not in {each.model_id for each in client.stats().models}
    assert receipt.wait(10.0) is Durability.NONE
    assert "gone again" in receipt.reason


async def test_the_asyncio_client_notices_nothing(sidecar: Sidecar, clients: list[Client]) -> None:
    async with await connect_async(sidecar.address) as client:
        for _ in range(2):
            for spec in SPECS:
                assert (await client.fetch(spec, TOKENS)).token_count == 0
                writer = await client.start_store(spec, TOKENS)
                await client.call(writer.abort)
                assert clients[1].lookup(spec, TOKENS).prefix_token_count == 0


def test_a_session_remembers_a_bounded_number_of_models(clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_room, "MODELS_MAX", 2)
    client = clients[1]
    for _ in range(2):
        for spec in SPECS:
            assert client.lookup(spec, TOKENS).prefix_token_count == 0
            assert len(client.connect_now().models) <= 2


def test_values_of_more_namespaces_than_are_registered_at_once(sidecar: Sidecar, clients: list[Client]) -> None:
    client = clients[0]
    for number in range(2 * LIMIT):
        assert client.put_bytes(f"space{number}", "key", b"value").wait(10.0) >= Durability.MEMORY
        value = clients[1].get_bytes(f"space{number}", "key")
        assert value is not None
        assert value.tobytes() == b"value"
        run("evict", "--yes", "--model", f"space{number}", "--socket", sidecar.socket_address.removeprefix("unix://"))
    assert clients[1].get_bytes("space0", "key") is None


def test_what_a_device_has_of_models_that_nobody_registered_survives_others(plane: str) -> None:
    with Sidecar("--capacity", "16 MiB", nvme="32 MiB", environment=ENVIRONMENT, plane=plane) as running:
        with connect(running.address) as client:
            hidden = {1: np.arange(COUNT * 32, dtype=np.uint16).reshape(COUNT, 32)}
            assert client.store(SPECS[0], TOKENS, CACHE, hidden=hidden).wait(10.0) is Durability.LOCAL
        running.stop()
        running.start()
        with connect(running.address) as client:
            for spec in SPECS[1:] * 2:
                assert client.lookup(spec, TOKENS, hold=True).prefix_token_count == 0
                client.start_store(spec, TOKENS, hidden_layers=(1,)).abort()
            found = client.fetch(SPECS[0], TOKENS, hidden_layers=(1,), verify=True)
            assert found.token_count == COUNT
            assert (bits(found.hidden[1]) == hidden[1]).all()
            assert (bits(next(iter(found))[0]) == CACHE[0][0]).all()


def test_an_earlier_client_is_told_as_before_and_a_later_one_why() -> None:
    """The wire: the status and the words of always, and a field beside them."""
    with Sidecar("--capacity", "16 MiB", environment=ENVIRONMENT) as running, Raw(running) as raw:
        query = raw.query(SPECS[0], tokens_of(16))
        for spec in SPECS[1:]:
            raw.query(spec, tokens_of(16))
        for method, request in (
            ("Lookup", pb.LookupRequest(query=query)),
            ("Fetch", pb.FetchRequest(query=query)),
            ("Store", pb.StoreRequest(reserve=pb.Reserve(query=query, token_digests=bytes(32)))),
            ("Locate", pb.LocateRequest(queries=[query])),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                raw.call(method, request)
            error: Any = caught.value
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "this model is not registered with this server: call RegisterModel first"
            name = fingerprint(SPECS[0], SPECS[0].kind)
            assert unpack_fields(error.trailing_metadata()) == {UNREGISTERED: name.hex()}


def test_the_weights_of_a_forgotten_model_may_have_another_geometry(clients: list[Client]) -> None:
    client = clients[0]
    assert client.lookup(SPECS[0], TOKENS, hold=True).prefix_token_count == 0
    for spec in SPECS[1:]:
        assert client.lookup(spec, TOKENS, hold=True).prefix_token_count == 0
        client.start_store(spec, TOKENS).abort()
    other = replace(SPECS[0], hidden_size=64)
    assert client.lookup(other, TOKENS).prefix_token_count == 0
