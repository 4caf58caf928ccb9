"""What the scheduler promises vLLM of encoded items, without vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.vllm.embeddings import ITEM_COUNT_MAX, WAIT_S_MAX, Fetching, Keeping
from kvstore_ops.sidecar import Sidecar

from tests.faulty_workers import FaultyWorkers, cancelled, refused
from tests.simulated import ManualClock
from tests.specs import small_spec

SPEC = small_spec(model_id="seeing", layers=())


class Later:
    """Threads that run what they were given when the test says so."""

    count = 1

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Callable[..., Any]]] = []

    def submit(self, function: Callable[..., Any], /, *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, lambda: function(*args)))
        return future

    def run(self) -> None:
        given, self.given = self.given, []
        for future, function in given:
            future.set_result(function())

    def close(self) -> None:
        """Nothing to end."""


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address) as made:
        yield made


@pytest.fixture
def kept(client: Client) -> Any:
    embeddings = torch.randn(8, 32).to(torch.bfloat16)
    client.put_encoder(SPEC, "cat", embeddings).wait(10)
    return embeddings


@pytest.mark.parametrize("way", [refused, cancelled], ids=lambda way: way.__name__)
def test_an_item_that_no_thread_fetches_is_encoded(client: Client, kept: Any, way: Any) -> None:
    threads = FaultyWorkers()
    fetching = Fetching(client, SPEC, threads=threads)
    threads.fail(way)
    assert fetching.are_settled("a", [("cat", 8)])
    assert not fetching.has("cat")
    assert fetching.are_settled("b", [("cat", 8)])
    assert fetching.has("cat"), "the next request asks again"


def test_a_request_waits_for_what_is_on_its_way(client: Client, kept: Any) -> None:
    threads = Later()
    fetching = Fetching(client, SPEC, threads=threads)
    wanted = [("cat", 8), ("dog", 4)]
    assert not fetching.are_settled("a", wanted)
    assert not fetching.has("cat")
    threads.run()
    assert fetching.are_settled("a", wanted)
    assert (fetching.has("cat"), fetching.has("dog")) == (True, False)
    fetching.allocated("cat")
    fetching.allocated("dog")  # by the encoder
    loads = fetching.step([])
    assert list(loads) == ["cat"]
    assert torch.equal(loads["cat"], kept)
    assert fetching.are_settled("b", wanted)  # vLLM has both
    assert not threads.given
    assert fetching.step(["cat"]) == {}
    assert not fetching.are_settled("c", wanted)  # it gave one up again


def test_nobody_waits_for_long(client: Client, kept: Any) -> None:
    threads, clock = Later(), ManualClock()
    fetching = Fetching(client, SPEC, threads=threads, clock=clock)
    assert not fetching.are_settled("a", [("cat", 8)])
    clock.advance(WAIT_S_MAX + 0.1)
    assert fetching.are_settled("a", [("cat", 8)])
    assert not fetching.has("cat")
    threads.run()
    assert fetching.are_settled("b", [("cat", 8)])
    assert fetching.has("cat")  # it came late, for another


def test_what_nobody_wants_any_more_is_let_go(client: Client, kept: Any) -> None:
    threads = Later()
    fetching = Fetching(client, SPEC, threads=threads)
    for number in range(ITEM_COUNT_MAX):
        fetching.are_settled("a", [(f"item {number}", 1)])
    assert fetching.are_settled("b", [("cat", 8)])  # too many at a time: encoded
    fetching.finished("a")
    assert not fetching.are_settled("c", [("cat", 8)])
    threads.run()
    assert fetching.are_settled("c", [("cat", 8)])
    fetching.finished("c")
    assert not fetching.has("cat")


def test_one_name_for_two_items_is_none(client: Client, kept: Any) -> None:
    threads = Later()
    fetching = Fetching(client, SPEC, threads=threads)
    assert not fetching.are_settled("a", [("cat", 8)])
    threads.run()
    assert fetching.are_settled("a", [("cat", 8)])
    assert fetching.are_settled("b", [("cat", 9)])
    assert not fetching.has("cat")
    assert fetching.are_settled("a", [("cat", 8)])
    assert not threads.given


def test_a_sidecar_that_is_gone_fails_nothing(own_sidecar: Sidecar) -> None:
    threads = Later()
    with connect(own_sidecar.address) as client:
        fetching, keeping = Fetching(client, SPEC, threads=threads), Keeping(client)
        own_sidecar.stop(kill=True)
        keeping.keep(SPEC, "cat", torch.zeros(8, 32, dtype=torch.bfloat16))
        keeping.keep(SPEC, "odd", torch.zeros(2, 8, 32, dtype=torch.bfloat16))  # no [tokens, hidden]
        assert not fetching.are_settled("a", [("cat", 8)])
        threads.run()
        assert fetching.are_settled("a", [("cat", 8)])
        assert not fetching.has("cat")
