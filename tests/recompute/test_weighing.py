"""Stored caches that were weighed may go before they are held: the plan is then of what is left. And a shared tier that
does not answer hides only what it has."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvstore_client.loading import planner as planner_module
from kvstore_client.lookup.match import ChunkMatch, Match, SegmentMatch, unknown_chunks
from kvstore_client.recompute.inquiry import Held, ask
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.weighing import Weighed, begin_probes, settled

from kvstore.errors import DataLoss, Exhausted
from kvstore.keys import Extra
from kvstore.planning import Facts, Holding, Plan, Recompute, decide
from kvstore.planning.loading import ComputeRate, HeldRun, LoadFacts, Stock, TierRate, plan_loading
from kvstore.seams import SystemClock
from kvstore.spec import ChunkState, Encoding, MissReason, ModelSpec, Tier
from tests.e2e.prefills import RECEIVER, SENDER, STEP
from tests.server.raw import eventually

COUNT, FOUND, WEIGHED, LEFT = (STEP * chunks for chunks in (8, 6, 4, 2))


class Shrunk:
    """Of the model's own prefix less is stored by now than was found."""

    planner = SimpleNamespace(mode_under=lambda _: "off")

    def release_ticket(self, _: bytes | None) -> None:
        return None

    def lookup(self, *_: Any, **__: Any) -> Match:
        return Match(LEFT, (), b"ticket")


def again(setting: Recompute) -> Any:
    """Hold four of six chunks, of which two have gone; a sibling has four."""
    client: Any = Shrunk()
    request = Request(RECEIVER, np.arange(COUNT, dtype=np.uint32), None, (SENDER.spec,), setting, (), 1, np.zeros(0))
    own, sender = Holding(None, WEIGHED), Holding(SENDER.spec, WEIGHED)
    facts = Facts(RECEIVER.spec, COUNT, COUNT - 1, own, (sender,), setting)
    held = Held({RECEIVER.spec: b"whole"}, own=Match(FOUND, (), b"whole"))
    found = Weighed(facts, decide(facts))
    assert [run.sender for run in found.plan.runs] == [None]
    return settled(client, request, found, held)


def test_a_sibling_takes_the_place_of_what_has_gone() -> None:
    plan = again(Recompute.droidspeak(0, 1))
    assert [(run.token_start, run.token_stop, run.sender) for run in plan.runs] == [
        (0, LEFT, None), (LEFT, WEIGHED, SENDER.spec)
    ]  # fmt: skip


def test_a_sibling_whose_hidden_states_nobody_asked_for_does_not() -> None:
    """They are asked for before anything is held."""
    with pytest.raises(DataLoss, match="lost since it was looked up"):
        again(Recompute.droidspeak(1, 2))


class HalfKnown:
    """The sidecar answers, and a shared tier does not: of the model's own prefix nobody knows. A document and the
    sibling's cache lie here."""

    planner = SimpleNamespace(mode_under=lambda _: "off")

    def lookup(self, spec: ModelSpec, *_: Any, **__: Any) -> Match:
        if spec == SENDER.spec:
            return Match(LEFT, (), b"ticket")
        segment = SegmentMatch(LEFT, WEIGHED, WEIGHED - LEFT, 0, ())
        return Match(0, unknown_chunks(STEP, 0, COUNT), segments=(segment,))


def test_a_shared_tier_that_is_away_takes_nothing_from_documents_and_siblings_that_are_here() -> None:
    client: Any = HalfKnown()
    tokens, setting = np.arange(COUNT, dtype=np.uint32), Recompute.reuse()
    request = Request.of(RECEIVER, tokens % 96, [(LEFT, WEIGHED)], (SENDER.spec,), setting, (), 1)
    plan = decide(ask(client, request, Held()))
    assert (plan.reason, plan.reused_token_count) == ("", WEIGHED)


class Deep:
    """Of two documents one lies in memory, and one in the tier whose load was given up."""

    planner = SimpleNamespace(mode_under=lambda _: "off")

    def lookup(self, *_: Any, **__: Any) -> Match:
        found = []
        for start, tier in ((LEFT, Tier.DRAM), (WEIGHED, Tier.NVME)):
            chunk = ChunkMatch(start, start + STEP, ChunkState.HIT, tier, Encoding.NONE, MissReason.NONE)
            found.append(SegmentMatch(start, start + STEP, STEP, 0, (chunk,)))
        return Match(0, unknown_chunks(STEP, 0, COUNT), segments=tuple(found))


def test_after_a_load_that_was_given_up_no_document_of_its_tier_is_loaded() -> None:
    client: Any = Deep()
    documents = [(LEFT, LEFT + STEP), (WEIGHED, WEIGHED + STEP)]
    tokens = np.arange(COUNT, dtype=np.uint32) % 96
    request = Request.of(RECEIVER, tokens, documents, (), Recompute.reuse(), (), 1)
    reused = [
        [(run.token_start, run.token_stop) for run in decide(ask(client, request, Held(), in_memory=late)).runs]
        for late in (False, True)
    ]
    assert reused == [documents, documents[:1]]


def test_what_a_plan_left_out_is_measured_by_the_prompt_as_it_is_stored() -> None:
    """A prompt with a salt, or an image, is stored under a name of its own: another's says nothing of its tier."""
    asked: list[Any] = []

    class Slow:
        planner = SimpleNamespace(mode="on", may_look=lambda: True, probe=lambda *_, **__: None)

        def peek(self, _spec: ModelSpec, _tokens: Any, *, extras: Any) -> Match:
            asked.append(extras)
            return Match(0, ())

    client: Any = Slow()
    salt = (Extra(0, b"salt"),)
    request = Request.of(RECEIVER, np.arange(COUNT, dtype=np.uint32) % 96, None, (), None, salt, 1)
    stock = Stock((HeldRun(FOUND, Tier.DRAM, 1e6),))
    fast, slow = ComputeRate(token_s=1e-6, sample_count=1), TierRate(1.0, 1.0, 1.0)
    loading = plan_loading(LoadFacts(COUNT, COUNT - 1, fast, slow, (stock,), unit_tokens=STEP))
    begin_probes(client, request, Plan(COUNT, loading=loading), None)
    eventually(lambda: bool(asked))
    assert asked == [salt]


def test_a_sidecar_that_streams_no_more_calls_is_asked_by_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is still loaded: it would be the load of others that has a prompt computed."""

    def begin(*_: Any) -> None:
        raise Exhausted("no more streams")

    monkeypatch.setattr(planner_module, "begin", begin)
    context: Any = SimpleNamespace(clock=SystemClock(), timeout_s=1.0, or_miss=nullcontext)
    planner = planner_module.Planner(context)
    found = Match(LEFT, unknown_chunks(STEP, 0, COUNT), b"ticket")
    client: Any = SimpleNamespace(planner=planner, peek=lambda *_, **__: None, lookup=lambda *_, **__: found)
    request = Request.of(RECEIVER, np.arange(COUNT, dtype=np.uint32) % 96, None, (), None, (), 1)
    held = Held()
    assert ask(client, request, held).own.prefix_token_count == LEFT
    assert held.tickets == {RECEIVER.spec: b"ticket"}
