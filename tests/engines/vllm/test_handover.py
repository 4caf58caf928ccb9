"""A prompt that one engine computes and another one answers, beside a real sidecar."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_client.engines.vllm.handover import ASKED, PART_S_MAX, PREFILLED, WAIT_S_MAX
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted
from kvstore.planning.loading import Prefill, Way
from tests.engines.vllm.engine import BLOCK, SPEC, Engine, blocks_of, matched, request, scheduled
from tests.server.raw import TIMEOUT_S, eventually
from tests.simulated import ManualClock
from tests.specs import tokens_of

COUNT, WHOLE = 42, 40


@pytest.fixture
def first(sidecar: Sidecar) -> Iterator[Engine]:
    """The engine that computes prompts."""
    engine = Engine(sidecar.address)
    yield engine
    engine.close()


class Second:
    """The scheduler of the engine that goes on with them, by a clock that stands."""

    def __init__(self, address: str, *, is_alone: bool = True, planning: str = "off") -> None:
        self.clock = ManualClock()
        self.client = connect(address, planning=planning)
        self.client.lookup(SPEC, tokens_of(COUNT, 1))
        eventually(lambda: self.client.connect_now().presence.is_there)
        self.side = SchedulerSide(
            self.client, Adapters(SPEC), ConnectorSettings(chunk_tokens=16, planning=planning), BLOCK,
            clock=self.clock, is_alone=is_alone,
        )  # fmt: skip

    def asks_again(self, asked: Any) -> bool:
        """True when vLLM is told to ask again, though the answer to the lookup has come. What it held is let go of by
        then: a call that is still under way when the clock is put forward would have taken as long."""
        for _ in range(100):
            count, _ = self.side.matched(asked, 0)
            tracked = self.side._tracked[asked.request_id]
            if count is not None or self.clock.monotonic() < tracked.look_again_s:
                assert not wait(self.side._lookups._releases, TIMEOUT_S).not_done
                return count is None
        raise AssertionError("the sidecar does not answer")


@pytest.fixture
def second(sidecar: Sidecar) -> Iterator[Second]:
    second = Second(sidecar.address)
    yield second
    second.side.close()


def handed(seed: int, said: object = WHOLE, **more: Any) -> Any:
    return request(f"second {seed}", tokens_of(COUNT, seed), kv_transfer_params={PREFILLED: said}, **more)


def finished(engine: Engine, seed: int, params: object) -> object:
    """What the engine that computed a prompt says at its end."""
    asked = request(f"first {seed}", tokens_of(COUNT, seed), kv_transfer_params=params)
    engine.admit(asked, blocks_of(COUNT))
    engine.fill(blocks_of(COUNT), seed)
    engine.compute(asked, blocks_of(COUNT), 0, COUNT)
    return engine.scheduler.finished(asked.request_id)


def test_an_engine_says_what_it_keeps_to_who_asks(first: Engine) -> None:
    assert finished(first, 700, {ASKED: True}) == {PREFILLED: WHOLE}
    assert finished(first, 700, {ASKED: True}) == {PREFILLED: WHOLE}  # now it loads it, and it is there as before
    for params in (None, {}, {ASKED: False}, "do_remote_decode", [ASKED]):
        assert finished(first, 701, params) is None


def test_what_is_not_kept_is_not_said_to_be(first: Engine) -> None:
    asked = request("first", tokens_of(COUNT, 702), kv_transfer_params={ASKED: True})
    first.admit(asked, blocks_of(COUNT))
    first.compute(asked, blocks_of(COUNT), 0, 5)  # no whole chunk of it
    assert first.scheduler.finished(asked.request_id) is None
    assert first.scheduler.finished("unknown") is None


def test_a_save_that_is_not_made_is_not_promised(first: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of blocks that a draft has read ahead of, or whose ranks' store nobody begins."""
    monkeypatch.setattr(first.scheduler._behind, "are_of", lambda *_: False)
    assert finished(first, 720, {ASKED: True}) is None


def test_the_second_engine_waits_for_what_the_first_keeps(first: Engine, second: Second) -> None:
    asked = handed(703)
    second.side.new_request(asked)
    for _ in range(3):
        assert second.asks_again(asked)
        second.clock.advance(WAIT_S_MAX / 10)
    first.keep(request("first", tokens_of(COUNT, 703)), blocks_of(COUNT))
    assert matched(second.side, asked, 0) == (WHOLE, True)


def test_a_part_of_it_is_waited_on_and_held_by_nobody(first: Engine, second: Second) -> None:
    first.keep(request("first", tokens_of(COUNT, 704)[:16]), blocks_of(16))
    asked = handed(704)
    second.side.new_request(asked)
    assert second.asks_again(asked)
    eventually(lambda: second.client.stats().sessions.ticket_count == 0)
    first.keep(request("more", tokens_of(COUNT, 704), skip_reading_prefix_cache=True), blocks_of(COUNT))
    second.clock.advance(WAIT_S_MAX / 2)
    assert matched(second.side, asked, 0) == (WHOLE, True)


def test_what_never_comes_is_computed_after_a_while(
    first: Engine, second: Second, caplog: pytest.LogCaptureFixture
) -> None:
    first.keep(request("first", tokens_of(COUNT, 705)[:16]), blocks_of(16))
    asked = handed(705)
    second.side.new_request(asked)
    assert second.asks_again(asked)
    second.clock.advance(WAIT_S_MAX)
    assert matched(second.side, asked, 0) == (16, True)
    assert "40 tokens of a prompt, and 16 of them came" in caplog.text


def test_a_part_of_a_chunk_is_not_waited_for_long(first: Engine, second: Second) -> None:
    """The chunks come from an engine on another node, and the part never does."""
    first.keep(request("first", tokens_of(COUNT, 770)[:32]), blocks_of(32))
    asked = handed(770)
    second.side.new_request(asked)
    assert second.asks_again(asked)
    second.clock.advance(PART_S_MAX)
    assert matched(second.side, asked, 0) == (32, True)


@pytest.mark.parametrize(("count", "said", "seed"), [(32, 32, 774), (32, 1 << 62, 775), (16, 16, 776)])
def test_a_chunk_at_the_end_of_a_prompt_is_waited_for(
    first: Engine, second: Second, count: int, said: int, seed: int
) -> None:
    """Though vLLM computes the last token of it itself."""
    tokens = tokens_of(count, seed)
    if count > 16:
        first.keep(request("first", tokens[:16]), blocks_of(16))
    asked = request("second", tokens, kv_transfer_params={PREFILLED: said})
    second.side.new_request(asked)
    for _ in range(2):
        assert second.asks_again(asked)
        second.clock.advance(PART_S_MAX)
    first.keep(request("more", tokens, skip_reading_prefix_cache=True), blocks_of(count))
    second.clock.advance(WAIT_S_MAX / 2)
    assert matched(second.side, asked, 0) == (count - BLOCK, True)


@pytest.mark.parametrize("said", [None, "40", True, -40, 4.5, 3, [40], {}])
def test_an_answer_that_says_no_whole_block_is_not_waited_for(second: Second, said: object) -> None:
    asked = handed(706, said)
    second.side.new_request(asked)
    assert not second.asks_again(asked)


def test_more_than_the_prompt_has_is_the_prompt(first: Engine, second: Second) -> None:
    first.keep(request("first", tokens_of(COUNT, 707)), blocks_of(COUNT))
    assert matched(second.side, handed(707, 1 << 62), 0) == (WHOLE, True)


def test_what_the_engine_has_itself_is_not_waited_for(second: Second) -> None:
    """A later turn, most of which the second engine computed."""
    asked = handed(708, 16)
    second.side.new_request(asked)
    assert matched(second.side, asked, 16) == (0, False)


def test_a_request_that_was_preempted_waits_for_nobody(second: Second) -> None:
    asked = handed(710)
    second.side.new_request(asked)
    assert matched(second.side, asked, WHOLE) == (0, False)
    second.side.allocated(asked, (blocks_of(COUNT),), 0)
    second.side.step(scheduled(asked.request_id, blocks_of(COUNT), WHOLE, COUNT - WHOLE))
    assert not second.asks_again(asked)


def test_engines_with_other_weights_wait_for_nothing_and_promise_nothing(first: Engine, second: Second) -> None:
    """After a reset an engine names its caches as no other one does."""
    waits, comes = handed(750), handed(751)
    second.side.new_request(waits)
    assert second.asks_again(waits)
    second.side.reset()
    second.side.new_request(comes)
    assert not second.asks_again(waits)
    assert not second.asks_again(comes)
    first.scheduler.reset()
    assert finished(first, 752, {ASKED: True}) is None


def test_while_no_sidecar_is_there_nothing_is_waited_for() -> None:
    with Sidecar("--capacity", "32 MiB") as sidecar:
        second = Second(sidecar.address)
    asked = handed(711)
    second.side.new_request(asked)
    assert not second.asks_again(asked)
    second.side.close()


def test_what_cannot_be_held_is_not_waited_for(
    first: Engine, second: Second, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Exhausted("no room")

    first.keep(request("first", tokens_of(COUNT, 712)[:16]), blocks_of(16))
    monkeypatch.setattr(second.client, "lookup", refuse)
    asked = handed(712)
    second.side.new_request(asked)
    assert not second.asks_again(asked)
    assert caplog.text.count("the prompt is computed") == 1


def test_a_load_is_planned_when_its_wait_has_ended(first: Engine, sidecar: Sidecar) -> None:
    second = Second(sidecar.address, planning="observe")
    first.keep(request("first", tokens_of(COUNT, 713)[:16]), blocks_of(16))
    asked = handed(713)
    second.side.new_request(asked)
    for _ in range(3):
        assert second.asks_again(asked)
        second.clock.advance(WAIT_S_MAX / 3)
    second.clock.advance(WAIT_S_MAX)
    assert matched(second.side, asked, 0) == (16, True)
    assert second.side._planner.counts == {Way.LOAD: 1}
    second.side.close()


@pytest.mark.parametrize(
    ("planning", "stored", "wait_s"), [("on", 0, 0.4), ("on", 16, 0.24), ("on", 0, 0.005), ("observe", 0, WAIT_S_MAX)]
)
def test_what_is_computed_sooner_is_not_waited_for(
    first: Engine, sidecar: Sidecar, planning: str, stored: int, wait_s: float
) -> None:
    """The engine computes what is missing within ``wait_s``."""
    second, seed = Second(sidecar.address, planning=planning), 721 + stored
    token_s = min(wait_s, 0.4) / (WHOLE - stored)
    for count in (16, 64) * 6:
        second.client.planner.computed(SPEC, 0, Prefill(count, 0, count * token_s))
    if stored:
        first.keep(request("first", tokens_of(COUNT, seed)[:stored]), blocks_of(stored))
    asked = handed(seed)
    second.side.new_request(asked)
    for advanced_s in (0.0, 0.9 * wait_s):
        second.clock.advance(advanced_s)
        assert second.asks_again(asked)
    second.clock.advance(0.2 * wait_s)
    assert not second.asks_again(asked)
    second.side.close()


@pytest.mark.parametrize(("count", "look_s"), [(4, 0.004), (64, 0.001)])
def test_looking_again_takes_a_part_of_the_loops_time(
    second: Second, monkeypatch: pytest.MonkeyPatch, count: int, look_s: float
) -> None:
    """However long prompts are, and however many wait: running requests wait meanwhile."""
    peek = second.client.peek

    def slow(*given: Any, **more: Any) -> Any:
        second.clock.advance(look_s)
        return peek(*given, **more)

    monkeypatch.setattr(second.client, "peek", slow)
    waiting = [handed(800 + each) for each in range(count)]
    for each in waiting:
        second.side.new_request(each)
    began_s, look_count = second.clock.monotonic(), 0
    while (passed_s := second.clock.monotonic() - began_s) < 0.9 * WAIT_S_MAX:
        for each in waiting:
            before_s = second.clock.monotonic()
            assert second.side.matched(each, 0) == (None, False)
            look_count += second.clock.monotonic() > before_s
        second.clock.advance(0.001)
    assert look_count > 2 * len(waiting)
    assert look_count * look_s < 0.25 * passed_s


def test_a_look_that_waits_for_a_call_takes_a_part_of_the_loops_time(
    first: Engine, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the prompt is there, which a call holds."""
    first.keep(request("first", tokens_of(COUNT, 771)[:16]), blocks_of(16))
    result = Future.result

    def slow(future: Future[Any], timeout_s: float | None = None) -> Any:
        second.clock.advance(0.004)
        return result(future, timeout_s)

    asked = handed(771)
    second.side.new_request(asked)
    monkeypatch.setattr(Future, "result", slow)
    assert second.asks_again(asked)
    assert second.side._tracked[asked.request_id].look_again_s - second.clock.monotonic() > 9 * 0.004


def test_requests_that_look_for_nothing_delay_no_look(second: Second, monkeypatch: pytest.MonkeyPatch) -> None:
    peek, asked = second.client.peek, handed(772)

    def slow(*given: Any, **more: Any) -> Any:
        second.clock.advance(0.004)
        return peek(*given, **more)

    monkeypatch.setattr(second.client, "peek", slow)
    for each in range(20):
        second.side.new_request(request(f"other {each}", tokens_of(COUNT, 773)))
    second.side.new_request(asked)
    assert second.asks_again(asked)
    assert second.side._tracked[asked.request_id].look_again_s - second.clock.monotonic() < 20 * 0.004


def test_who_waits_for_another_engine_takes_no_turn_from_those_behind(
    first: Engine, second: Second, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for what one request holds."""
    for seed, count in ((714, 16), (715, COUNT)):
        first.keep(request(f"first {seed}", tokens_of(COUNT, seed)[:count]), blocks_of(count))
    asked, behind = handed(714), request("behind", tokens_of(COUNT, 715))
    second.side.new_request(asked)
    second.side.new_request(behind)
    second.side._lookups._ahead_max = 1
    assert second.asks_again(asked)
    lookup, goes_on = second.client.lookup, threading.Event()

    def wait(*given: Any, **more: Any) -> Any:
        assert goes_on.wait(10)
        return lookup(*given, **more)

    monkeypatch.setattr(second.client, "lookup", wait)
    assert second.side.matched(behind, 0) == (None, False)
    second.clock.advance(WAIT_S_MAX / 10)
    second.side._lookups.step_begins()
    assert second.side.matched(asked, 0) == (None, False)
    goes_on.set()
    eventually(lambda: second.side._lookups._asked[behind.request_id].answer.done())
    assert second.side.matched(behind, 0) == (WHOLE, True)


def test_beside_other_connectors_nothing_is_waited_for(sidecar: Sidecar) -> None:
    """They may have it."""
    second = Second(sidecar.address, is_alone=False)
    asked = handed(709)
    second.side.new_request(asked)
    assert not second.asks_again(asked)
    second.side.close()
