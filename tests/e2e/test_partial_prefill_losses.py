"""What partial prefill had counted on goes: it costs time, and no answer is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from time import sleep
from typing import Any

import pytest
import torch
from kvstore_client import Client, Exactness, LayerStream, Recompute, connect
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.fetch.target import DenseTarget
from kvstore_client.lookup import calls
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss, Exhausted, InvalidRequest
from tests.e2e.prefills import FULL, FUSED, MODEL, RECEIVER, SENDER, STEP, in_full, keep, keep_alone, same
from tests.e2e.test_partial_prefill import SIBLINGS
from tests.recompute.models import prompt, sibling_of
from tests.server.raw import eventually


def test_hidden_states_that_do_not_come_cost_time_not_answers(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> None:
        raise DataLoss("the hidden states were lost under the copy")

    tokens = prompt(70, 351)
    with connect(local_sidecar.address) as client:
        keep(client, SENDER, tokens[:64], 1)
        monkeypatch.setattr(DenseTarget, "copy_hidden", lost)
        found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=SIBLINGS[3])
        in_full(found, tokens)
        assert "lost under the copy" in found.plan.reason
        assert client.stats().sessions.lease_count == 0


def lost(sidecar: Sidecar, client: Client) -> None:
    def lose() -> None:
        raise DataLoss("lost, says the test")

    client.faults.arm("fetch.copy.middle", lose)


def killed_before_the_fetch(sidecar: Sidecar, client: Client) -> None:
    start_fetch = client.start_fetch

    def gone(*arguments: Any, **options: Any) -> Any:
        session = client.connect_now()
        sidecar.stop(kill=True)
        assert session.ended.wait(10.0), "the client never noticed"
        return start_fetch(*arguments, **options)

    client.start_fetch = gone  # type: ignore[method-assign]


def restarted_before_the_fetch(sidecar: Sidecar, client: Client) -> None:
    start_fetch = client.start_fetch

    def forgotten(*arguments: Any, **options: Any) -> Any:
        sidecar.stop(kill=True)
        sidecar.start()
        return start_fetch(*arguments, **options)

    client.start_fetch = forgotten  # type: ignore[method-assign]


@pytest.mark.parametrize("happens", [lost, killed_before_the_fetch, restarted_before_the_fetch])
def test_a_sidecar_that_goes_in_the_middle_costs_time_only(
    own_sidecar: Sidecar, happens: Callable[[Sidecar, Client], None]
) -> None:
    tokens = prompt(40, 407)
    with connect(own_sidecar.address, timeout_s=2.0) as client:
        keep(client, SENDER, tokens, 1)
        keep(client, RECEIVER, tokens[:16])
        happens(own_sidecar, client)
        found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
        in_full(found, tokens)
        assert "computed in full" in found.plan.reason


def test_a_kill_that_nobody_has_noticed_yet_changes_nothing(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client copies what it found from the memory that both have mapped, and checks it there."""
    tokens = prompt(40, 407)
    with monkeypatch.context() as patch, connect(local_sidecar.address, timeout_s=2.0) as client:
        keep(client, SENDER, tokens, 1)
        keep(client, RECEIVER, tokens[:16])
        ask = partial(client.partial_prefill, RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
        expected, start_fetch = ask(), client.start_fetch

        def gone(*arguments: Any, **options: Any) -> Any:
            local_sidecar.stop(kill=True)
            return start_fetch(*arguments, **options)

        patch.setattr(MappedSession, "close", lambda _: None)  # so the thread that watches ends nothing
        client.start_fetch = gone  # type: ignore[method-assign]
        found = ask()
        same(found, expected)
        assert found.exactness is Exactness.DERIVED


def test_more_documents_than_a_session_has_streams_take_turns(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are open at once each lets the next one in. Where none of the prompt's own is open nobody waits."""
    documents = [prompt(20, 430 + number) for number in range(4)]
    for document in documents:
        keep_alone(client, RECEIVER, document, 1)
    tokens = torch.cat((prompt(3, 440), *documents, prompt(4, 441)))
    segments, started = [(start, start + 20) for start in range(3, 83, 20)], list[Any]()
    begin, refused, most = client.start_fetch_segment, threading.Event(), 2

    def begun(*given: Any, **options: Any) -> Any:
        if sum(not each.is_done for each in started) >= most:
            refused.set()
            raise Exhausted("this session has 2 streams open")
        started.append(begin(*given, **options))
        return started[-1]

    monkeypatch.setattr(client, "start_fetch_segment", begun)
    client.faults.arm("fetch.copy.middle", lambda: refused.wait(10.0))
    for setting in (Recompute.cacheblend(1, 0.2), Recompute(1, 1, 0.2)):  # the latter fetches E of each by itself
        refused.clear()
        found = client.partial_prefill(RECEIVER, tokens, segments=segments, recompute=setting)
        assert (found.plan.reused_token_count, found.plan.reason) == (80, "")
        assert refused.is_set()
    most = 0
    found = client.partial_prefill(RECEIVER, tokens, segments=segments, recompute=setting)
    client.faults.arm("fetch.copy.middle", lambda: None)
    in_full(found, tokens)
    assert "2 streams open" in found.plan.reason


def test_no_sidecar_is_a_plain_prefill_that_says_so(own_sidecar: Sidecar) -> None:
    tokens = prompt(40, 408)
    with connect(own_sidecar.address) as client:
        own_sidecar.stop(kill=True)
        found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
        in_full(found, tokens)
        assert "unavailable" in found.plan.reason


def test_nothing_stays_held(client: Client) -> None:
    """Tickets and leases of calls that took one sender of two, or nothing, are given back."""
    tokens = prompt(70, 409)
    keep(client, SENDER, tokens[:64], 1)
    other = TransformersRunner(sibling_of(MODEL, 5), chunk_tokens=STEP)
    keep(client, other, tokens[:32], 1)
    for setting in (FUSED, Recompute.droidspeak(1, 3), FULL, None):
        client.partial_prefill(RECEIVER, tokens, senders=[other.spec, SENDER.spec], recompute=setting)
    for _ in range(200):
        held = client.stats().sessions
        if (held.ticket_count, held.lease_count) == (0, 0):
            return
        sleep(0.02)  # leases are given back beside the caller
    raise AssertionError(f"still held: {held}")


@pytest.mark.parametrize("step", ["chunk_matches", "pack_ticket", "matched"])
def test_a_lookup_that_is_interrupted_holds_nothing(client: Client, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Also once the sidecar has answered: nobody else knows of the ticket."""
    tokens = prompt(64, 410)
    keep(client, RECEIVER, tokens)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(calls, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.lookup(RECEIVER.spec, tokens, hold=True)
    eventually(lambda: client.stats().sessions.ticket_count == 0, 10.0)


def test_a_release_that_is_interrupted_is_made_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, release, asked = prompt(70, 411), client.release_ticket, list[Any]()
    keep(client, RECEIVER, tokens[:64])
    keep(client, SENDER, tokens[:32])

    def interrupted(ticket: Any) -> None:
        asked.append(ticket)
        if len(asked) == 1:
            raise KeyboardInterrupt
        release(ticket)

    with monkeypatch.context() as patch:
        patch.setattr(client, "release_ticket", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=FUSED)
    eventually(lambda: client.stats().sessions.ticket_count == 0, 10.0)


def test_a_fetch_that_ends_behind_the_merge_does_not_make_it_exact(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sibling's whole prompt is exact as the sibling's, and lands in memory that is a merged cache by then."""
    tokens, end = prompt(64, 901), LayerStream._await_commit
    keep(client, SENDER, tokens)

    def late(stream: LayerStream, *arguments: Any) -> None:
        sleep(0.5)
        end(stream, *arguments)

    monkeypatch.setattr(LayerStream, "_await_commit", late)
    found = client.partial_prefill(RECEIVER, tokens, senders=[SENDER.spec], recompute=Recompute.reuse())
    assert found.exactness is Exactness.DERIVED
    with pytest.raises(InvalidRequest, match="DERIVED"):
        client.store(RECEIVER.spec, tokens, [(k, v) for k, v in found.kv])
    assert client.lookup(RECEIVER.spec, tokens).prefix_token_count == 0
