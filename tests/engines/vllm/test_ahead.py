"""A long queue: what is held for requests that vLLM has no blocks for yet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm import lookups
from kvstore_client.engines.vllm.lookups import AHEAD_COUNT_MAX
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted
from tests.engines.vllm.engine import Engine, blocks_of, matched, request, scheduled
from tests.server.raw import eventually
from tests.specs import tokens_of

LONG = 200
"""Tokens of a prompt for whose 12 chunks the limit of tickets has no room. Three of 42 tokens have."""


@pytest.fixture
def narrow() -> Iterator[Engine]:
    yield from limited("128 KiB")


@pytest.fixture
def narrowest() -> Iterator[Engine]:
    """One prompt of 42 tokens at a time."""
    yield from limited("64 KiB")


def limited(most: str) -> Iterator[Engine]:
    environment = {**os.environ, "KVSTORE__LIMITS__TICKET_BYTES_MAX": most}
    with Sidecar("--capacity", "32 MiB", environment=environment) as own:
        engine = Engine(own.address)
        yield engine
        engine.close()


def rounds(engine: Engine, queue: Sequence[Any], at_once: int) -> dict[str, int]:
    """Schedule as vLLM does, with blocks for so many requests in a step, whose loads land before the next step: all
    are asked for in their order, until one finds no blocks. How many tokens each was given to load. Steps without work
    take no time, so it is seconds that are bounded: hundreds of steps fit into one pause of a refused request."""
    left, given, until_s = list(queue), dict[str, int](), time.monotonic() + 20.0
    for each in left:
        engine.scheduler.new_request(each)
    while left:
        assert time.monotonic() < until_s, f"{len(left)} requests wait for ever"
        blocks = at_once
        for each in list(left):
            count, _ = engine.scheduler.matched(each, 0)
            if count is None:
                continue
            if not blocks:
                break
            blocks -= 1
            left.remove(each)
            given[each.request_id] = count
            engine.scheduler.allocated(each, (blocks_of(42),), count)
        landed(engine)
    return given


def landed(engine: Engine) -> None:
    step = engine.scheduler.step(scheduled("x", [], 0, 0))
    engine.worker.begin(step)
    names = set[str]()
    while len(names) < len(step.loads):
        names |= engine.landed()
    engine.scheduler.received(SimpleNamespace(finished_recving=names, invalid_block_ids=set()))
    assert engine.worker.failed_blocks() == set()


def test_a_long_queue_behind_a_small_limit_loads_all_the_same(
    narrowest: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody computes a stored prompt because those behind it hold theirs, or because one before it did when it was
    looked up."""
    for seed in range(30, 36):
        narrowest.keep(request(f"kept {seed}", tokens_of(42, seed)), blocks_of(42))
    queue = [request(f"r{number}", tokens_of(42, 30 + number % 6)) for number in range(24)]
    assert set(rounds(narrowest, queue, at_once=1).values()) == {40}
    assert "computed" not in caplog.text
    for each in queue:
        narrowest.scheduler.finished(each.request_id)
    eventually(lambda: narrowest.clients[0].stats().sessions.ticket_count == 0)


def test_a_prompt_that_no_limit_has_room_for_is_computed(narrow: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """It waits for those that hold something, and not for what will never be."""
    for seed, count in ((40, 42), (41, 42), (42, LONG)):
        narrow.keep(request(f"kept {seed}", tokens_of(count, seed)), blocks_of(count))
    queue = [request("long", tokens_of(LONG, 42))]
    queue += [request(f"r{number}", tokens_of(42, 40 + number % 2)) for number in range(6)]
    given = rounds(narrow, queue, at_once=1)
    assert given.pop("long") == 0
    assert caplog.text.count("the prompt is computed") == 1
    assert set(given.values()) == {40}


def test_a_prompt_that_is_refused_for_long_is_computed_however_many_come_behind_it(
    narrow: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others hold something at each time, and always will."""
    monkeypatch.setattr(lookups, "REFUSED_S_MAX", 0.5)
    for seed, count in ((45, 42), (46, LONG)):
        narrow.keep(request(f"kept {seed}", tokens_of(count, seed)), blocks_of(count))
    long, until_s, number = request("long", tokens_of(LONG, 46)), time.monotonic() + 20.0, 0
    narrow.scheduler.new_request(long)
    while narrow.scheduler.matched(long, 0)[0] is None:
        assert time.monotonic() < until_s
        number += 1
        small = request(f"r{number}", tokens_of(42, 45))
        narrow.scheduler.matched(small, 0)
        narrow.scheduler.step(scheduled("x", [], 0, 0))
    assert narrow.scheduler.matched(long, 0) == (0, False)
    for each in range(number + 1):
        narrow.scheduler.finished(f"r{each}")


def test_the_first_of_the_queue_is_looked_up_although_those_behind_it_hold_all(sidecar: Sidecar) -> None:
    """One that was preempted, or goes before others: what is found for those would take its blocks."""
    engine = Engine(sidecar.address)
    engine.keep(request("kept", tokens_of(42, 52)), blocks_of(42))
    for number in range(AHEAD_COUNT_MAX):
        assert matched(engine.scheduler, request(f"r{number}", tokens_of(42, 52)), 0) == (40, True)
    first = request("first", tokens_of(42, 52))
    assert engine.scheduler.matched(first, 0) == (None, False)

    def is_found() -> bool:
        engine.scheduler.step(scheduled("x", [], 0, 0))
        return engine.scheduler.matched(first, 0) == (40, True)

    eventually(is_found)
    assert len(engine.scheduler._lookups._found) <= AHEAD_COUNT_MAX
    engine.close()


def test_a_load_that_is_on_its_way_is_waited_for(narrow: Engine) -> None:
    """It holds what the limit allows, and will not for long."""
    for seed in (43, 44):
        narrow.keep(request(f"kept {seed}", tokens_of(100, seed)), blocks_of(100))
    first, second = (request(f"r{seed}", tokens_of(100, seed)) for seed in (43, 44))
    assert narrow.admit(first, blocks_of(100)) == 96
    real, refused = narrow.clients[0].lookup, []

    def lookup(*args: Any, **how: Any) -> Any:
        try:
            return real(*args, **how)
        except Exhausted as error:
            refused.append(error)
            raise

    narrow.clients[0].lookup = lookup  # type: ignore[method-assign]  # it is looked at

    def asked() -> bool:
        assert narrow.scheduler.matched(second, 0) == (None, False)
        return len(refused) > 2

    eventually(asked)
    landed(narrow)
    eventually(lambda: narrow.scheduler.matched(second, 0) == (96, True))
    assert narrow.scheduler._tracked["r44"].refused_s is None, "another refusal, after a preemption, begins anew"


def test_one_that_was_asked_for_first_waits_for_what_came_before_it_all_the_same(narrowest: Engine) -> None:
    """Two threads look up: the first request was alone when it was asked for, and the second one got all the room."""
    for seed in (53, 54):
        narrowest.keep(request(f"kept {seed}", tokens_of(42, seed)), blocks_of(42))
    first, second = (request(f"r{seed}", tokens_of(42, seed)) for seed in (53, 54))
    real, go = narrowest.clients[0].lookup, threading.Event()

    def lookup(spec: Any, prompt: Any, **how: Any) -> Any:
        assert list(prompt[:2]) != first.all_token_ids[:2] or go.wait(10.0)
        return real(spec, prompt, **how)

    narrowest.clients[0].lookup = lookup  # type: ignore[method-assign]  # a slow one in its place
    assert narrowest.scheduler.matched(first, 0) == (None, False)
    assert matched(narrowest.scheduler, second, 0) == (40, True)
    asked = narrowest.scheduler._lookups._asked["r53"]
    go.set()
    eventually(lambda: asked.answer.done())
    assert asked.answer.result().refusal
    assert narrowest.scheduler.matched(first, 0) == (None, False)
    narrowest.scheduler.finished("r54")
    eventually(lambda: narrowest.scheduler.matched(first, 0) == (40, True))


def test_what_is_being_let_go_of_is_waited_for(narrowest: Engine) -> None:
    """The first of the queue has others let go of what they hold. That takes a call of its own."""
    for seed in (55, 56):
        narrowest.keep(request(f"kept {seed}", tokens_of(42, seed)), blocks_of(42))
    first, second = (request(f"r{seed}", tokens_of(42, seed)) for seed in (55, 56))
    assert matched(narrowest.scheduler, second, 0) == (40, True)
    narrowest.scheduler._lookups._ahead_max = 1
    real, go = narrowest.clients[0].release_ticket, threading.Event()

    def release(*args: Any) -> None:
        assert go.wait(10.0)
        real(*args)

    narrowest.clients[0].release_ticket = release  # type: ignore[method-assign]  # one that is late in its place
    narrowest.scheduler.step(scheduled("x", [], 0, 0))

    def is_refused() -> bool:
        assert narrowest.scheduler.matched(first, 0) == (None, False)
        return narrowest.scheduler._tracked["r55"].refused_s is not None

    eventually(is_refused)
    go.set()
    eventually(lambda: narrowest.scheduler.matched(first, 0) == (40, True))


def test_few_requests_are_looked_up_ahead(sidecar: Sidecar) -> None:
    """Also where each answer takes its time. The others are asked for once vLLM has blocks for those before them."""
    engine, go, asked = Engine(sidecar.address), threading.Event(), []
    engine.keep(request("kept", tokens_of(42, 50)), blocks_of(42))
    real = engine.clients[0].lookup

    def slow(*args: Any, **how: Any) -> Any:
        asked.append(args)
        assert go.wait(10.0)
        return real(*args, **how)

    engine.clients[0].lookup = slow  # type: ignore[method-assign]  # replaced
    queue = [request(f"r{number}", tokens_of(42, 50)) for number in range(2 * AHEAD_COUNT_MAX)]
    assert {engine.scheduler.matched(each, 0) for each in queue} == {(None, False)}
    assert len(engine.scheduler._lookups._asked) == AHEAD_COUNT_MAX
    go.set()
    for each in queue[:AHEAD_COUNT_MAX]:
        eventually(lambda each=each: engine.scheduler.matched(each, 0) == (40, True))
    assert engine.scheduler.matched(queue[AHEAD_COUNT_MAX], 0) == (None, False)
    assert len(asked) == AHEAD_COUNT_MAX
    engine.scheduler.finished(queue[0].request_id)
    eventually(lambda: engine.scheduler.matched(queue[AHEAD_COUNT_MAX], 0) == (40, True))
    assert engine.scheduler.matched(request("cold", tokens_of(42, 51)), 0) == (None, False), "it is looked up later"
    assert set(rounds(engine, queue[1:], at_once=5).values()) == {40}
    engine.close()
