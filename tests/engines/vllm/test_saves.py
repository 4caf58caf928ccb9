"""Saves that go on after their step: a block that is written again is never stored as what it held before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm import saves as room
from kvstore_client.engines.vllm.moved import Moved
from kvstore_client.engines.vllm.saves import Saves
from kvstore_client.engines.vllm.step import Save
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal
from tests.engines.vllm.engine import SPEC, Engine, blocks_of, matched, request, scheduled, wait_stored
from tests.server.raw import eventually
from tests.simulated import ManualClock
from tests.specs import tokens_of


class Held:
    """A client whose stores begin when somebody says so."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.go, self.begun = threading.Event(), threading.Event()
        self.store_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def store(self, *args: Any, **how: Any) -> Any:
        self.store_count += 1
        self.begun.set()
        assert self.go.wait(20.0)
        return self._client.store(*args, **how)


@pytest.fixture
def held(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Held]]:
    """An engine whose saves do not begin to read before they are let."""
    monkeypatch.setattr(room, "SLOW_S", 0.05)
    engine = Engine(sidecar.address)
    client = Held(engine.clients[1])
    engine.worker._saves._client = client  # type: ignore[assignment]  # it stands in for one
    yield engine, client
    client.go.set()
    monkeypatch.undo()  # on a busy machine the stores that go on now take longer than a test's END_S_MAX
    engine.close()


def computed(engine: Engine, name: str, seed: int, blocks: list[int]) -> tuple[Any, list[Any]]:
    """Compute a prompt of 42 tokens; its save is begun."""
    asked = request(name, tokens_of(42, seed))
    assert engine.admit(asked, blocks) == 0
    filled = engine.fill(blocks, seed)
    engine.worker.give_way(engine.scheduler.step(scheduled("x", [], 0, 0)))
    assert engine.compute(asked, blocks, 0, 42).saves
    return asked, filled


def test_a_step_does_not_wait_for_its_saves(held: tuple[Engine, Held]) -> None:
    engine, client = held
    _, filled = computed(engine, "a", 300, blocks_of(42))
    assert client.begun.wait(10.0)
    engine.scheduler.finished("a")  # vLLM frees its blocks
    client.go.set()
    other, blocks = request("b", tokens_of(42, 300)), blocks_of(42, 20)
    eventually(lambda: engine.clients[0].lookup(SPEC, tokens_of(42, 300)).prefix_token_count == 40)
    assert engine.admit(other, blocks) == 40
    engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
    assert engine.landed() == {"b"}
    for ours, theirs in zip(engine.content(blocks[:10]), filled, strict=True):
        assert torch.equal(ours, theirs[:10])


def test_a_block_that_is_given_out_again_is_read_before_it_is_written(held: tuple[Engine, Held]) -> None:
    engine, client = held
    _, filled = computed(engine, "a", 301, blocks_of(42))
    assert client.begun.wait(10.0)
    engine.scheduler.finished("a")
    threading.Timer(0.3, client.go.set).start()  # longer than a save that has not begun is waited for
    computed_after(engine, "b", 302, blocks_of(42))
    fetched = engine.clients[0].fetch(SPEC, tokens_of(42, 301))
    assert fetched.token_count == 40
    kept = filled[0][:10, :, :, :8].transpose(0, 1).flatten(1, 2)
    assert torch.equal(fetched[0][0], kept)


def computed_after(engine: Engine, name: str, seed: int, blocks: list[int]) -> None:
    """Compute a prompt in blocks that were another's. vLLM lets the connector give way before it writes."""
    asked = request(name, tokens_of(42, seed))
    assert engine.admit(asked, blocks) == 0
    step = engine.scheduler.step(scheduled(name, blocks, 0, 42))
    engine.worker.give_way(step)
    engine.fill(blocks, seed)
    engine.worker.save(step.saves)
    for save in step.saves:
        wait_stored(engine.clients[0], save)


def test_a_save_that_has_not_begun_is_given_up_for_its_blocks(held: tuple[Engine, Held]) -> None:
    """The first is held up, so the second does not begin."""
    engine, client = held
    computed(engine, "a", 303, blocks_of(42))
    assert client.begun.wait(10.0)
    computed(engine, "b", 304, blocks_of(42, 20))
    engine.worker._saves.give_way(blocks_of(42, 20)[:1])
    engine.fill(blocks_of(42, 20), 9)
    saves = [each.done for each in engine.worker._saves._pending]
    client.go.set()
    wait_stored(engine.clients[0], Save(SPEC, tokens_of(40, 303), (), []))
    assert not wait(saves, 10.0).not_done
    assert client.store_count == 1
    assert engine.clients[0].lookup(SPEC, tokens_of(42, 304)).prefix_token_count == 0


def test_pages_are_not_given_away_under_a_save_that_reads_on(
    held: tuple[Engine, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, client = held
    monkeypatch.setattr(room, "END_S_MAX", 0.05)
    computed(engine, "a", 305, blocks_of(42))
    assert client.begun.wait(10.0)
    engine.worker._saves.give_way([60])  # another's block
    with pytest.raises(Internal, match="cannot be stopped"):
        engine.worker._saves.give_way([blocks_of(42)[0]])


def test_a_save_is_waited_for_as_long_as_its_calls_may_take(
    held: tuple[Engine, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever gives calls a minute has an engine that waits for a sidecar that stalls, and none that ends."""
    engine, client = held
    monkeypatch.setattr(room, "END_S_MAX", 0.05)
    engine.worker._saves = Saves(
        client, engine.worker._pages, CallPause(engine.worker._clock), Moved(), call_s_max=10.0  # type: ignore[arg-type]  # it stands in for one
    )  # fmt: skip
    computed(engine, "a", 316, blocks_of(42))
    assert client.begun.wait(10.0)
    threading.Timer(0.5, client.go.set).start()
    engine.worker._saves.give_way([blocks_of(42)[0]])
    assert client.go.is_set()


def test_the_end_stops_loads_also_where_a_save_reads_on(
    held: tuple[Engine, Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM frees the pages next, and a load would write on."""
    engine, client = held
    monkeypatch.setattr(room, "END_S_MAX", 0.05)
    computed(engine, "a", 315, blocks_of(42))
    assert client.begun.wait(10.0)
    stopped: list[float] = []
    load: Any = SimpleNamespace(transfers=[SimpleNamespace(cancel=stopped.append)])
    engine.worker._moving["b"] = load
    with pytest.raises(Internal, match="cannot be stopped"):
        engine.worker.close()
    assert stopped


def test_where_nobody_says_which_blocks_change_a_save_ends_in_its_step(held: tuple[Engine, Held]) -> None:
    engine, client = held
    client.go.set()
    asked = request("a", tokens_of(42, 306))
    engine.admit(asked, blocks_of(42))
    engine.fill(blocks_of(42), 1)
    assert engine.compute(asked, blocks_of(42), 0, 42).saves
    assert all(each.done.done() for each in engine.worker._saves._pending)


def test_more_saves_than_may_wait_are_dropped(held: tuple[Engine, Held], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, client = held
    monkeypatch.setattr(room, "PENDING_MAX", 2)
    for number in range(4):
        computed(engine, f"a{number}", 310 + number, blocks_of(42, 11 * number))
    client.go.set()
    engine.worker._saves.end()
    found = [engine.clients[0].lookup(SPEC, tokens_of(42, 310 + number)) for number in range(4)]
    eventually(lambda: bool(engine.clients[0].lookup(SPEC, tokens_of(42, 311))))
    assert [bool(each) for each in found[2:]] == [False, False]


def test_ranks_are_told_when_one_of_them_gives_up() -> None:
    """It joins their store and leaves, so that nobody waits for its heads."""
    clock, said = ManualClock(), []

    class Writer:
        wanted_token_count, wanted_token_start = 40, 0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            said.append("left")

        def put_layer(self, *_: object, **__: object) -> None:
            said.append("put")

    client: Any = SimpleNamespace(join_store=lambda *_: Writer())
    pages: Any = SimpleNamespace(views=[(0, 0)], groups=[None], rank=0, heads=(0, 1), computed=lambda: lambda: None)
    saves = Saves(client, pages, CallPause(clock), Moved())
    saves.begin(Save(SPEC, tokens_of(40), (), [blocks_of(40)], b"ticket"), is_wanted=False)
    saves.close()
    assert said == ["left"]


def test_blocks_that_another_connector_loads_into_are_named(engine: Engine) -> None:
    """In a MultiConnector, which calls all of them: the other's load begins in this step, which computes nothing of the
    request."""
    side, theirs = engine.scheduler, request("theirs", tokens_of(42, 322))
    side.new_request(theirs)
    assert matched(side, theirs, 8) == (0, False)
    side.allocated(theirs, ([9, 8, 7, 6],), 0)
    assert side.step(scheduled("x", [], 0, 0)).written == [7, 6]
    assert side.step(scheduled("x", [], 0, 0)).written == []


def test_the_scheduler_names_the_blocks_that_a_step_may_write(engine: Engine) -> None:
    side = engine.scheduler
    tokens = tokens_of(42, 320)
    engine.keep(request("a", tokens), blocks_of(42))
    assert side.step(scheduled("new", [9, 8, 7, 6], 5, 8)).written == [8, 7, 6], "the first holds tokens that stay"
    assert side.step(scheduled("new", [5], 13, 4, is_new=False)).written == [5]
    resumed = scheduled("new", [1, 2, 3], 4, 8, is_new=False)
    resumed.scheduled_cached_reqs.resumed_req_ids.add("new")
    assert side.step(resumed).written == [2, 3]
    assert side.step(scheduled("untracked", [11], 0, 4)).written == [11]
    loaded, blocks = request("b", tokens), blocks_of(42, 20)
    side.new_request(loaded)
    assert matched(side, loaded, 8) == (32, True)
    side.allocated(loaded, (blocks,), 32)
    assert side.step(scheduled("x", [], 0, 0)).written == blocks[2:], "also those that no load fills"
    side.reported([blocks[4]])
    assert side.step(scheduled("b", [], 16, 4, is_new=False)).written == blocks[4:], "it computes again what it had"
