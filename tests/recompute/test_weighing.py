"""Stored caches that were weighed may go before they are held: the plan is then of what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvstore_client.lookup.match import Match
from kvstore_client.recompute.inquiry import Held
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.weighing import Weighed, settled

from kvstore.errors import DataLoss
from kvstore.planning import Facts, Holding, Recompute, decide
from tests.e2e.prefills import RECEIVER, SENDER, STEP

COUNT, FOUND, WEIGHED, LEFT = (STEP * chunks for chunks in (8, 6, 4, 2))


class Shrunk:
    """Of the model's own prefix less is stored by now than was found."""

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
