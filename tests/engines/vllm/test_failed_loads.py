"""Loads of vLLM's connector that fail, and one that does not though its sidecar dies."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from kvstore_client import connect
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import SPEC, Engine, blocks_of, matched, request, scheduled
from tests.server.raw import TIMEOUT_S
from tests.specs import tokens_of


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tickets name no places, so that loads take calls, which fail where the ticket or the sidecar is gone."""
    monkeypatch.setattr(MappedSession, "maps_chunks", False)


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_load_that_fails_is_told_and_not_tried_again(sidecar: Sidecar, load: str) -> None:
    tokens = tokens_of(42, 8 if load == "async" else 9)
    engine = Engine(sidecar.address, load=load)
    engine.keep(request("a", tokens), blocks_of(42))
    asked, blocks = request("b", tokens), blocks_of(42, 20)
    assert engine.admit(asked, blocks) == 40
    engine.clients[0].release_ticket(engine.scheduler._loads[0].ticket)
    if load == "async":
        engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
        assert engine.landed() == {"b"}
    else:
        engine.compute(asked, blocks, 40, 2)
    failed = engine.worker.failed_blocks()
    assert failed == set(blocks if load == "layerwise" else blocks[:10])  # what is computed over them is wrong, too
    engine.scheduler.reported(failed)
    assert matched(engine.scheduler, asked, 0) == (0, False)
    step = engine.compute(asked, blocks, 0, 42)
    assert set(step.settled) == failed
    assert bool(step.saves) == (load == "async")  # a layerwise step may have read what was not there
    other = request("c", tokens_of(42, 20 if load == "async" else 21))
    assert engine.admit(other, blocks) == 0
    assert engine.compute(other, blocks, 0, 42).saves
    engine.close()


def test_a_preempted_request_loads_again_where_a_load_into_its_old_blocks_failed(sidecar: Sidecar) -> None:
    """They are another request's by then."""
    tokens, engine = tokens_of(42, 25), Engine(sidecar.address)
    engine.keep(request("a", tokens), blocks_of(42))
    preempted, blocks = request("b", tokens), blocks_of(42, 20)
    assert engine.admit(preempted, blocks) == 40
    engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
    assert engine.landed() == {"b"}
    engine.compute(preempted, blocks, 40, 2)
    assert matched(engine.scheduler, preempted, 0) == (40, True)
    assert engine.admit(request("c", tokens), blocks) == 40
    engine.scheduler.reported(blocks[:10])
    assert matched(engine.scheduler, request("c", tokens), 0) == (0, False)
    engine.scheduler._lookups.forget("b")  # as when it waits for long
    assert matched(engine.scheduler, preempted, 0) == (40, True)
    engine.close()


def test_a_load_that_fails_holds_nothing_any_longer(own_sidecar: Sidecar) -> None:
    """Its ticket would hold the chunks until it is too old, at the cost of other prompts."""
    tokens = tokens_of(42, 22)
    engine = Engine(own_sidecar.address)
    engine.keep(request("a", tokens), blocks_of(42))
    assert engine.admit(request("b", tokens), blocks_of(42, 20)) == 40
    step = engine.scheduler.step(scheduled("x", [], 0, 0))
    step.loads = [replace(step.loads[0], ticket=b"not a ticket")]
    engine.worker.begin(step)
    assert engine.landed() == {"b"}
    assert engine.clients[0].stats().sessions.ticket_count == 1
    engine.scheduler.reported(engine.worker.failed_blocks())
    until = time.monotonic() + TIMEOUT_S
    while engine.clients[0].stats().sessions.ticket_count:
        assert time.monotonic() < until
        time.sleep(0.01)
    engine.close()


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_request_that_has_blocks_which_a_load_fills_waits_for_the_next_step(sidecar: Sidecar, load: str) -> None:
    """Layerwise, where vLLM has the blocks at once. A load that fails would leave nothing in them."""
    tokens = tokens_of(90, 30 if load == "async" else 31)
    engine = Engine(sidecar.address, load=load)
    engine.keep(request("a", tokens[:42]), blocks_of(42))
    first = request("b", tokens)
    assert engine.admit(first, blocks_of(90), 8) == 32
    assert engine.scheduler.matched(request("c", tokens), 88) == ((0, False) if load == "async" else (None, False))
    assert engine.scheduler.matched(request("d", tokens[:9]), 8) == (0, False), "it has none of them"
    engine.compute(first, blocks_of(90), 40, 50)
    assert matched(engine.scheduler, request("c", tokens), 88) == (0, False)
    engine.close()


@pytest.mark.usefixtures("called")
def test_what_is_computed_over_a_failed_load_is_not_kept(sidecar: Sidecar) -> None:
    engine = Engine(sidecar.address, load="layerwise")
    tokens = tokens_of(90, 11)
    engine.keep(request("a", tokens[:42]), blocks_of(42))
    asked, blocks = request("b", tokens), blocks_of(90, 20)
    assert engine.admit(asked, blocks) == 40
    engine.clients[0].release_ticket(engine.scheduler._loads[0].ticket)
    step = engine.compute(asked, blocks, 40, 50)  # the failure shows in this very step
    assert [save.tokens.size for save in step.saves] == [88]
    failed = set(blocks[:10])
    assert engine.scheduler.reported(failed) == set(blocks), "vLLM's prefix cache drops what was computed over them"
    engine.close()  # which finishes what is being kept
    with connect(sidecar.address) as client:
        assert client.lookup(SPEC, tokens).prefix_token_count == 40


def test_a_layerwise_load_that_a_layer_did_not_wait_for_has_failed(sidecar: Sidecar) -> None:
    tokens = tokens_of(42, 14)
    engine = Engine(sidecar.address, load="layerwise")
    engine.keep(request("a", tokens), blocks_of(42))
    for waited, failed in ((2, 0), (1, 11)):
        asked, blocks = request(f"b{waited}", tokens), blocks_of(42, 20)
        assert engine.admit(asked, blocks) == 40
        engine.worker.begin(engine.scheduler.step(scheduled(asked.request_id, blocks, 40, 2)))
        for layer in range(waited):
            engine.worker.wait_layer(layer)
        engine.worker.end_layerwise()
        assert engine.worker.failed_blocks() == set(blocks[:failed])
    engine.close()


def test_a_load_from_places_outlasts_its_sidecar(own_sidecar: Sidecar) -> None:
    """The ticket says where the chunks lie, and the engine still maps that memory."""
    tokens = tokens_of(42, 17)
    engine = Engine(own_sidecar.address)
    engine.keep(request("a", tokens), blocks_of(42))
    asked, blocks = request("b", tokens), blocks_of(42, 20)
    assert engine.admit(asked, blocks) == 40
    os.kill(own_sidecar.pid, signal.SIGSTOP)
    engine.worker.begin(engine.scheduler.step(scheduled("b", blocks, 40, 2)))
    assert engine.landed() == {"b"}
    own_sidecar.stop(kill=True)
    assert engine.worker.failed_blocks() == set()
    assert all(torch.equal(page[blocks[:10]], page[blocks_of(42)[:10]]) for page in engine.pages)
    engine.close()


@pytest.mark.usefixtures("called")
@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_sidecar_that_dies_under_a_load_fails_it(own_sidecar: Sidecar, load: str) -> None:
    tokens = tokens_of(42, 16)
    engine = Engine(own_sidecar.address, load=load, timeout_s=2.2)
    engine.keep(request("a", tokens), blocks_of(42))
    asked, blocks = request("b", tokens), blocks_of(42, 20)
    assert engine.admit(asked, blocks) == 40
    os.kill(own_sidecar.pid, signal.SIGSTOP)  # the load has begun and does not come
    engine.worker.begin(engine.scheduler.step(scheduled("b", blocks, 40, 2)))
    own_sidecar.stop(kill=True)
    if load == "async":
        assert engine.landed() == {"b"}
    else:
        engine.worker.wait_layer(0)
        engine.worker.wait_layer(1)
        engine.worker.end_layerwise()
    assert engine.worker.failed_blocks() == set(blocks if load == "layerwise" else blocks[:10])
    assert all(not page[blocks].any() for page in engine.pages)
    engine.close()
