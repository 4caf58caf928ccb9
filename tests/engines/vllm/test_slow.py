"""The scheduler's side beside a sidecar that takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import BLOCK, SPEC, Engine, blocks_of, matched, request, scheduled
from tests.server.raw import eventually
from tests.simulated import ManualClock
from tests.specs import tokens_of


class Slow:
    """A client whose lookups that hold take as long as somebody says."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.go = threading.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def lookup(self, *args: Any, **how: Any) -> Any:
        self.asked += 1
        assert self.go.wait(10.0)
        return self._client.lookup(*args, **how)


@pytest.fixture
def slow(sidecar: Sidecar) -> Iterator[tuple[Engine, Slow, ManualClock]]:
    """An engine with one stored prompt, whose scheduler asks a slow client, by a clock that stands."""
    engine, clock = Engine(sidecar.address), ManualClock()
    if not engine.clients[0].lookup(SPEC, tokens_of(42, 60)):
        engine.keep(request("kept", tokens_of(42, 60)), blocks_of(42))
    engine.scheduler.close()
    engine.clients[0] = connect(sidecar.address)
    client = Slow(engine.clients[0])
    engine.clients[0].lookup(SPEC, tokens_of(42, 60))
    eventually(lambda: engine.clients[0].connect_now().presence.is_there)
    found: Any = client
    engine.scheduler = SchedulerSide(found, Adapters(SPEC), ConnectorSettings(chunk_tokens=16), BLOCK, clock=clock)
    yield engine, client, clock
    client.go.set()
    engine.close()


def test_an_answer_nobody_came_for_is_asked_for_again(slow: tuple[Engine, Slow, ManualClock]) -> None:
    """Its ticket may have expired meanwhile."""
    engine, client, clock = slow
    asked = request("a", tokens_of(42, 60))
    assert engine.scheduler.matched(asked, 0) == (None, False)
    client.go.set()
    eventually(lambda: engine.scheduler._lookups._asked["a"].answer.done())
    clock.advance(30.0)
    assert matched(engine.scheduler, asked, 0) == (40, True)
    assert client.asked == 2
    assert clock.monotonic() - engine.scheduler._lookups._found["a"].at_s == 0.0


def test_what_is_held_for_a_request_that_waits_long_is_let_go(slow: tuple[Engine, Slow, ManualClock]) -> None:
    """Behind a long queue: its answer is too old to be used, and what it holds is room for those whose turn it is."""
    engine, client, clock = slow
    assert engine.scheduler.matched(request("nobody comes for it", tokens_of(42, 60)), 0) == (None, False)
    client.go.set()
    eventually(lambda: engine.scheduler._lookups._asked["nobody comes for it"].answer.done())
    for name in ("a", "b"):
        assert matched(engine.scheduler, request(name, tokens_of(42, 60)), 0) == (40, True)
        clock.advance(3.0)
    engine.scheduler.step(scheduled("x", [], 0, 0))
    assert (list(engine.scheduler._lookups._found), list(engine.scheduler._lookups._asked)) == (["b"], [])
    eventually(lambda: engine.clients[1].stats().sessions.ticket_count == 1)
    assert matched(engine.scheduler, request("a", tokens_of(42, 60)), 0) == (40, True)
    engine.scheduler.finished("a")
    engine.scheduler.finished("b")


def test_a_hold_that_is_not_needed_any_more_is_let_go(slow: tuple[Engine, Slow, ManualClock]) -> None:
    engine, client, _ = slow
    asked = request("a", tokens_of(42, 60))
    assert engine.scheduler.matched(asked, 0) == (None, False)
    assert engine.scheduler.matched(asked, 40) == (0, False), "vLLM has all of it meanwhile"
    engine.scheduler.allocated(asked, (blocks_of(42),), 0)
    assert not engine.scheduler._lookups._asked
    client.go.set()
    eventually(lambda: engine.clients[1].stats().sessions.ticket_count == 0)


def test_nobody_waits_behind_holds_that_are_slow(slow: tuple[Engine, Slow, ManualClock]) -> None:
    """Many wait for two threads: that is no slow sidecar; and what is not stored is known at once."""
    engine, client, clock = slow
    for number in range(20):
        assert engine.scheduler.matched(request(f"a{number}", tokens_of(42, 60)), 0) == (None, False)
    assert engine.scheduler.matched(request("cold", tokens_of(42, 61)), 0) == (0, False)
    eventually(lambda: client.asked == 2)
    clock.advance(1.9)
    for number in range(20):
        assert engine.scheduler.matched(request(f"a{number}", tokens_of(42, 60)), 0) == (None, False)
    client.go.set()
    for number in range(20):
        assert matched(engine.scheduler, request(f"a{number}", tokens_of(42, 60)), 0) == (40, True)


def test_the_end_cancels_what_nobody_began(slow: tuple[Engine, Slow, ManualClock]) -> None:
    engine, client, clock = slow
    for number in range(20):
        engine.scheduler.matched(request(f"a{number}", tokens_of(42, 60)), 0)
    eventually(lambda: client.asked == 2)
    clock.advance(2.1)
    assert engine.scheduler.matched(request("a0", tokens_of(42, 60)), 0) == (0, False), "too slow: it is computed"
    client.go.set()
    engine.scheduler.close()
    assert client.asked == 2
