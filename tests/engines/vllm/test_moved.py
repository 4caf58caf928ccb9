"""What a worker says that it has moved, for vLLM's log and metrics."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.moved import COUNTS, SECONDS, TIMES_MAX, Moved, in_few_numbers, summed
from kvstore_client.engines.vllm.saves import Saves
from kvstore_client.engines.vllm.step import Save
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import BLOCK, SPEC, Engine, blocks_of, request, scheduled, wait_stored
from tests.server.raw import eventually
from tests.simulated import ManualClock
from tests.specs import tokens_of

TOKEN_BYTES = 2 * 2 * 2 * 8 * 2  # K and V of two layers, two heads of 8 numbers, 2 bytes each


def told(engine: Engine) -> dict[str, Any]:
    """What it has moved since the last question, but the time that it took."""
    found = engine.worker.moved.take()
    seconds = found.pop(SECONDS, [])
    assert len(seconds) == found.get("loads", 0)
    assert all(0 < each < 60 for each in seconds)
    return found


def saved(engine: Engine, count: int) -> None:
    """Wait until so many saves have ended, and say that they were all."""
    eventually(lambda: engine.worker.moved._counts["saves"] == count)


def test_a_prompt_that_is_kept_and_loaded_is_counted(engine: Engine) -> None:
    tokens = tokens_of(42, 900)
    engine.keep(request("a", tokens), blocks_of(42))
    saved(engine, 1)
    assert told(engine) == {"saves": 1, "save_tokens": 40}
    assert engine.admit(request("b", tokens), blocks_of(42, 20), computed=8) == 32
    engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
    engine.landed()
    assert told(engine) == {"loads": 1, "load_tokens": 32, "load_bytes": 32 * TOKEN_BYTES}
    assert told(engine) == {}


def test_of_a_windowed_group_what_has_blocks_is_counted(sidecar: Sidecar) -> None:
    """The first of two layers has a block for each token, the second one for the last sixteen."""
    groups = (LayerGroup(0, (0,), BLOCK), LayerGroup(1, (1,), BLOCK, 16))
    engine, tokens = Engine(sidecar.address, groups=groups), tokens_of(42, 901)
    every, window = list(range(1, 12)), list(range(20, 31))
    asked = request("a", tokens)
    assert engine.admit(asked, (every, window)) == 0
    (save,) = engine.compute(asked, (every, window), 0, 42).saves
    wait_stored(engine.clients[0], save)
    saved(engine, 1)
    assert told(engine) == {"saves": 1, "save_tokens": 40}
    again = request("b", tokens)
    loaded = engine.admit(again, (every, [0] * 6 + window[6:]))
    engine.worker.begin(engine.scheduler.step(scheduled("x", ([], []), 0, 0)))
    engine.landed()
    assert loaded == 40
    in_window = loaded - 6 * BLOCK
    assert told(engine) == {
        "loads": 1, "load_tokens": loaded, "load_bytes": (loaded + in_window) * TOKEN_BYTES // 2
    }  # fmt: skip
    engine.close()


def test_a_load_that_fails_and_a_save_that_gives_way_are_counted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MappedSession, "maps_chunks", False)  # tickets name no places: loads take calls
    tokens = tokens_of(42, 902)
    engine.keep(request("a", tokens), blocks_of(42))
    saved(engine, 1)
    told(engine)
    assert engine.admit(request("b", tokens), blocks_of(42, 20)) == 40
    engine.clients[0].release_ticket(engine.scheduler._loads[0].ticket)
    engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
    engine.landed()
    assert told(engine) == {"failed_loads": 1}
    go_on = threading.Event()
    engine.worker._saves._thread.submit(go_on.wait)  # saves wait behind it
    asked = request("c", tokens_of(42, 903))
    assert engine.admit(asked, blocks_of(42)) == 0
    assert engine.compute(asked, blocks_of(42), 0, 42).saves
    for pending in engine.worker._saves._pending:
        assert pending.give_up()
    go_on.set()
    eventually(lambda: engine.worker.moved._counts["dropped_saves"] == 1)
    assert told(engine) == {"dropped_saves": 1}


def test_a_save_that_no_thread_took_is_dropped(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    asked, blocks = request("a", tokens_of(42, 906)), blocks_of(42)
    assert engine.admit(asked, blocks) == 0
    engine.worker._saves._thread.close()
    assert engine.compute(asked, blocks, 0, 42).saves
    engine.worker._saves.give_way(blocks)
    assert "a prompt is not kept" in caplog.text
    assert told(engine) == {"dropped_saves": 1}


def test_a_share_that_gives_way_is_dropped() -> None:
    """Of a store that ranks share: the sidecar wants its tokens, and its blocks are given to others meanwhile."""
    go_on = threading.Event()
    writer = MagicMock(wanted_token_count=40, wanted_token_start=0)
    writer.__exit__.return_value = False
    client: Any = SimpleNamespace(join_store=lambda *_: go_on.wait() and writer)
    group = LayerGroup(0, (0,), BLOCK)
    pages: Any = SimpleNamespace(groups=(group,), rank=0, computed=lambda: lambda: None)
    moved = Moved()
    saves = Saves(client, pages, CallPause(ManualClock()), moved)
    saves.begin(Save(SPEC, tokens_of(40), (), [blocks_of(40)], b"ticket"))
    for pending in saves._pending:
        assert pending.give_up()
    go_on.set()
    saves.close()
    assert moved.take() == {"dropped_saves": 1}


def test_a_prompt_that_is_kept_already_is_not_dropped(sidecar: Sidecar) -> None:
    """Two engines compute the same prompt at the same time."""
    first, second = (Engine(sidecar.address) for _ in range(2))
    tokens = tokens_of(42, 904)
    for engine in (first, second):
        assert engine.admit(request("a", tokens), blocks_of(42)) == 0
    for engine in (first, second):
        engine.compute(request("a", tokens), blocks_of(42), 0, 42)
        engine.worker._saves.end()
    assert told(first) == {"saves": 1, "save_tokens": 40}
    assert "dropped_saves" not in told(second)
    for engine in (first, second):
        engine.close()


def test_a_prompt_that_is_kept_in_pieces_is_counted_once(engine: Engine) -> None:
    asked, blocks = request("a", tokens_of(64, 905)), blocks_of(64)
    assert engine.admit(asked, blocks) == 0
    engine.fill(blocks, 905)
    for start in range(0, 64, 16):
        new = blocks[start // BLOCK : start // BLOCK + 4]
        (save,) = engine.compute(asked, new, start, 16, is_new=start == 0).saves
        wait_stored(engine.clients[0], save)
    saved(engine, 4)
    assert told(engine) == {"saves": 4, "save_tokens": 64}


@pytest.mark.parametrize(
    ("wants", "counted"),
    [
        ({"wanted_token_count": 0, "wanted_token_start": 40, "failure": ""}, {}),
        ({"wanted_token_count": 0, "wanted_token_start": 40, "failure": "no sidecar answers"}, {"dropped_saves": 1}),
        ({"wanted_token_count": 40, "wanted_token_start": 0, "failure": ""}, {"dropped_saves": 1}),
    ],
    ids=["it has all", "it is not there", "it lacks what is before"],
)
def test_what_is_not_kept_of_several_tables_is_dropped(wants: dict[str, Any], counted: dict[str, int]) -> None:
    """But not where the sidecar has it."""
    writer = MagicMock(**wants)
    writer.__exit__.return_value = False
    client: Any = SimpleNamespace(start_store=lambda *_, **__: writer)
    groups = tuple(LayerGroup(index, (index,), BLOCK) for index in range(2))
    pages: Any = SimpleNamespace(groups=groups, rank=0, computed=lambda: lambda: None)
    moved = Moved()
    saves = Saves(client, pages, CallPause(ManualClock()), moved)
    saves.begin(Save(SPEC, tokens_of(40), (), [blocks_of(24)] * 2, start=16))
    saves.close()
    assert moved.take() == counted
    assert not writer.put_layer.called


def test_of_very_many_loads_the_times_of_the_first_are_kept() -> None:
    moved = Moved()
    for _ in range(TIMES_MAX + 5):
        moved.loaded(1, 2, 0.5)
    found = moved.take()
    assert (found["loads"], found["load_bytes"], len(found[SECONDS])) == (TIMES_MAX + 5, 2 * TIMES_MAX + 10, TIMES_MAX)


def test_workers_are_added_up_and_shown_in_a_line() -> None:
    one = {"loads": 1, "load_tokens": 32, "load_bytes": 64, SECONDS: [0.010]}
    other = {"loads": 2, "load_tokens": 8, "load_bytes": 16, "failed_loads": 1, SECONDS: [0.030, 0.020]}
    both = summed(one, other)
    assert both == {
        "loads": 3, "load_tokens": 40, "load_bytes": 80, "failed_loads": 1, SECONDS: [0.010, 0.030, 0.020]
    }  # fmt: skip
    assert summed(one, {}) == one
    assert in_few_numbers(both) == {
        "loads": 3, "load_tokens": 40, "load_bytes": 80, "failed_loads": 1, "mean_load_ms": 20.0,
        "longest_load_ms": 30.0,
    }  # fmt: skip
    assert in_few_numbers({"saves": 1}) == {"saves": 1}
    assert {count.name for count in COUNTS} >= {*both} - {SECONDS}


def test_mends_are_counted_with_their_times() -> None:
    moved = Moved()
    moved.mended(51, 30, 0.25)
    one = moved.take()
    moved.mended(9, 10, 0.75)
    assert in_few_numbers(summed(one, moved.take())) == {
        "mends": 2, "mend_reused_tokens": 60, "mend_computed_tokens": 40, "mean_mend_ms": 500.0,
        "longest_mend_ms": 750.0,
    }  # fmt: skip
    assert moved.take() == {}
